"""Views: text for terminals, an element for notebooks, a file; of layouts, arrays and plans."""

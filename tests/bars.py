"""What holds of the view of any contract."""

from collections import Counter


def bars_have_every_byte(contract):
    """Asserts that the view has all that is sent and declared, each byte once; returns it."""
    shown = contract.by_parameter()
    parts = Counter()
    for bar in shown.bars:
        parts.update(bar.parts)
    assert sum(parts.values()) == sum(each.bytes for each in contract.collectives)
    assert sum(bar.expected or 0 for bar in shown.bars) == contract.wire_bytes_limit
    hidden = sum(size for kind, size in parts.items() if "hidden" in kind)
    assert hidden == sum(each.hidden for each in contract.collectives)
    paths = {each.path for each in contract.expected}
    count = sum(bar.count for bar in shown.bars if bar.expected is not None)
    assert count >= len(paths)
    return shown

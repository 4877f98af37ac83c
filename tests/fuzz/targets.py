"""The targets by name."""

from fuzz.harness import Target
from fuzz.imported import DcpTarget, LevanterTarget, OrbaxTarget
from fuzz.saved import CheckpointTarget
from fuzz.stored import ConfigJsonTarget, SafetensorsTarget, TokenizerTarget
from fuzz.texts import DocumentsTarget, ShardsTarget
from fuzz.written import CommandLineTarget, ConfigTarget

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        ConfigTarget,
        CommandLineTarget,
        SafetensorsTarget,
        ConfigJsonTarget,
        TokenizerTarget,
        DocumentsTarget,
        ShardsTarget,
        CheckpointTarget,
        OrbaxTarget,
        DcpTarget,
        LevanterTarget,
    )
}

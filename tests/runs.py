"""Reads what a run has written."""

import json


def records(directory, file="metrics.jsonl"):
    return [json.loads(line) for line in (directory / file).read_text().splitlines()]


def losses(directory):
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records(directory)]

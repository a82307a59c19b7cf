"""What the coordinator and its workers both speak of: one dataclass for each thing, and one codec for the wire."""

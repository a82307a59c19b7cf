"""The vocabulary that the coordinator shares with its workers: one dataclass for each concept, and one wire codec."""

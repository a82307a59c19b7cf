"""Data that the coordinator and its workers exchange, and the one wire codec."""

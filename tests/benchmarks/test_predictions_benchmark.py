"""The benchmark of predictions: edits, and comparison with a baseline."""

from difflib import SequenceMatcher

from benchmarks.predictions import edited, summary, wrong

TEXT = " ".join(f"word{number}" for number in range(200))


def test_an_edited_text_differs_in_three_places() -> None:
    codes = SequenceMatcher(None, TEXT.split(), edited(TEXT).split(), autojunk=False).get_opcodes()
    changes = [(kind, a1 - a0, b1 - b0) for kind, a0, a1, b0, b1 in codes if kind != "equal"]
    assert changes == [("replace", 3, 3), ("insert", 0, 6), ("delete", 6, 0)]


def test_a_wrong_text_has_the_same_words() -> None:
    assert sorted(wrong(TEXT).split()) == sorted(TEXT.split())
    assert wrong(TEXT).startswith("word199 word198 ")


def test_ratios_are_taken_within_a_repeat() -> None:
    run = {"tokens_per_s": 30.0, "accepted": 9.0, "rejected": 1.0, "exact_match": 1.0}
    plain = [{**run, "tokens_per_s": speed} for speed in (10.0, 15.0, 20.0)]
    row = summary(8, "edited", [run] * 3, plain)
    assert (row["to"], row["ratio"], row["ratio_min"], row["ratio_max"]) == ("plain", 2.0, 1.5, 3.0)
    assert (row["accepted"], row["rejected"], row["exact_match"]) == (9.0, 1.0, 1.0)

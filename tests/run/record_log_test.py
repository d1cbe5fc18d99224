"""Files of records: what a reader gives of lines that are none."""

import json

from looplib.run import records


def test_a_line_that_is_longer_than_any_record_is_one_line_that_is_left_out(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps({"step": step, "split": "train", "loss": 1.0}) for step in (1, 2)]
    for ending in ("", "\n" + good[1] + "\n"):
        path.write_text(good[0] + "\n" + json.dumps({"step": 5, "split": "train", "x": "y" * (10 << 20)}) + ending)
        caplog.clear()
        assert [one.step for one in records.RecordLog(str(path))] == ([1, 2] if ending else [1])
        (said,) = (one.getMessage() for one in caplog.records)
        assert "line 2 is not a record" in said

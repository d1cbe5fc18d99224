"""Markers, and directories of checkpoints: what is written is read, and what is damaged never counts, nor as another."""

import dataclasses
import hashlib
import json
import pathlib
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tampering import sign

from looplib.errors import CheckpointError
from looplib.run import commits

TEXT = st.text(max_size=6)
SCORES = st.dictionaries(
    TEXT, st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
SHA256 = st.text("0123456789abcdef", min_size=64, max_size=64)
PLACES = st.floats(0, 1, exclude_max=True)  # of a file
ENDINGS = ["index", "data-00000-of-00002", "data-00001-of-00002", "position-0-of-2", "position-1-of-2"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)


@st.composite
def markers(draw):
    step = draw(st.integers(0, 10**12))
    names = [f"ckpt-{step}.{ending}" for ending in draw(st.lists(st.sampled_from(ENDINGS), unique=True))]
    files = {name: {"bytes": draw(st.integers(0, 2**60)), "sha256": draw(SHA256)} for name in names}
    time = draw(st.floats(0, 1e11, exclude_max=True))
    return commits.Commit(f"ckpt-{step}", step, time, files, draw(SCORES), draw(st.dictionaries(TEXT, TEXT)))


def written(done, folder):
    """A marker in an empty folder: with its path, the file, and its fields."""
    path = pathlib.Path(tempfile.mkdtemp(dir=folder)) / done.path
    done = dataclasses.replace(done, path=str(path))
    commits.write_marker(done)
    file = path.with_name(f"{path.name}.commit")
    return done, file, json.loads(file.read_text())


def check_refused(file):
    (found,) = commits.listing(str(file.parent))
    assert found.commit is None and found.unread is None and found.reason.startswith("its marker cannot be read (")
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        commits.read_marker(str(file.with_suffix("")))


def same(content, fields):
    try:
        return json.dumps(json.loads(content), sort_keys=True) == json.dumps(fields, sort_keys=True)
    except (ValueError, RecursionError):
        return False


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(done=markers(), damages=st.lists(st.tuples(PLACES, st.integers(1, 255), st.binary(max_size=3))))
def test_a_marker_is_read_as_it_was_written_and_any_change_of_its_bytes_is_refused(done, damages, tmp_path):
    done, file, fields = written(done, tmp_path)
    assert commits.read_marker(done.path) == done and commits.committed(str(file.parent)) == [done]
    assert fields["format"] == (2 if any(".position-" in name for name in done.files) else 1)
    checksum = hashlib.sha256(json.dumps({k: v for k, v in fields.items() if k != "sha256"}, sort_keys=True).encode())
    assert fields["sha256"] == checksum.hexdigest()
    content = file.read_bytes()
    for where, bits, inserted in damages:
        place = int(where * len(content))
        before, byte, after = content[:place], content[place], content[place + 1 :]
        for changed in (before, before + bytes([byte ^ bits]) + after, before + inserted + content[place:]):
            file.write_bytes(changed)
            if same(changed, fields):  # white space
                assert commits.read_marker(done.path) == done
            else:
                check_refused(file)


FITS = {  # what a field may hold in a marker of a step, whose checksum is right
    "step": lambda value, step: type(value) is int and value == step,
    "time": lambda value, _: type(value) in (int, float) and 0 <= value < 1e11,
    "versions": lambda value, _: isinstance(value, dict),
    "scores": lambda value, _: isinstance(value, dict)
    and all(one is None or isinstance(one, (int, float)) for one in value.values()),
    "files": lambda value, step: isinstance(value, dict)
    and all(
        name in [f"ckpt-{step}.{ending}" for ending in ENDINGS]
        and type(file["bytes"]) is int and file["bytes"] >= 0 and isinstance(file["sha256"], str)
        for name, file in value.items()
    ),
}  # fmt: skip


def values(field, done):
    """Values of a field, of which many are wrong."""
    if field == "files":
        own = st.sampled_from([f"{done.path}.{ending}" for ending in ENDINGS])
        names = (
            own | TEXT | st.sampled_from(["/etc/passwd", "../notes", "", ".", "ckpt-x.index", f"a/{done.path}.index"])
        )
        file = st.fixed_dictionaries(
            {"bytes": st.integers(-1) | st.floats() | st.booleans(), "sha256": SHA256 | st.integers()}
        )
        return st.dictionaries(names, file, max_size=2) | st.just([])
    near = {
        "step": st.integers(-1) | st.just(str(done.step)),
        "scores": st.dictionaries(TEXT, JSON),
        "time": st.floats(),
    }
    return JSON | near.get(field, st.nothing())


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(done=markers(), field=st.sampled_from(sorted(FITS)), data=st.data())
def test_a_marker_of_another_program_is_read_or_refused_field_by_field(done, field, data, tmp_path):
    done, file, fields = written(done, tmp_path)
    value = data.draw(values(field, dataclasses.replace(done, path=file.stem)))
    sign(file, {**fields, field: value})
    if FITS[field](value, done.step):
        assert commits.read_marker(done.path) == dataclasses.replace(done, **{field: value})
    else:
        check_refused(file)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(done=markers(), scores=SCORES, added=JSON, newer=st.integers(3), by=TEXT)
def test_a_marker_of_another_version_keeps_its_fields_or_is_refused_by_name(done, scores, added, newer, by, tmp_path):
    done, file, fields = written(done, tmp_path)
    file.write_text(json.dumps({**fields, "color": added}))
    check_refused(file)  # without a checksum of its own
    sign(file, {**fields, "color": added})
    assert commits.read_marker(done.path) == done
    more = commits.add_scores(done, {name: score for name, score in scores.items() if score is not None})
    assert more == dataclasses.replace(
        done, scores={**done.scores, **{k: v for k, v in scores.items() if v is not None}}
    )
    assert json.loads(file.read_text())["color"] == added
    sign(file, {**fields, "color": added, "format": newer, "versions": {"looplib": by}})
    for read in (lambda: commits.read_marker(done.path), lambda: commits.listing(str(file.parent))):
        with pytest.raises(CheckpointError) as refused:
            read()
        assert f"{file.name} has the format {newer}, written by looplib {by}, and looplib" in str(refused.value)


def test_a_marker_without_a_field_that_has_a_default_counts(tmp_path, monkeypatch):
    done, file, fields = written(commits.Commit("ckpt-2", 2, 1.0, {}, {}, {}), tmp_path)
    later = dataclasses.make_dataclass("Later", [("host", str, "")], bases=(commits.Commit,), frozen=True)
    monkeypatch.setattr(commits, "Commit", later)
    assert commits.read_marker(done.path).host == ""


WHOLE = ["", "being deleted"]
LOST = ["marker cut", "marker changed", "marker gone"]  # which is noticed in any checkpoint
TORN = ["file cut", "file changed", "file gone", "file is a directory"]  # and this, in one that is read
DAMAGES = st.sampled_from([*WHOLE, *LOST, *TORN, "foreign"])


def make(folder, step, damage, place):
    """Writes a checkpoint of TensorFlow's two files, and damages it at a place, from 0 to 1."""
    contents = {f"ckpt-{step}.index": b"index %d" % step * 5, f"ckpt-{step}.data-00000-of-00001": b"data %d" % step * 9}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
    commits.write_marker(commits.Commit(str(folder / f"ckpt-{step}"), step, 1.0, files, {}, {}))
    marker = folder / f"ckpt-{step}.commit"
    file = marker if damage.startswith("marker") else folder / list(contents)[place > 0.5]
    content = file.read_bytes()
    at = int(place * len(content))
    if damage in ("being deleted", "marker gone"):
        marker.with_suffix(".unfinished").write_text("")
    if damage.endswith("cut"):
        file.write_bytes(content[:at])
    elif damage.endswith("changed"):
        file.write_bytes(content[:at] + (b"#" if content[at : at + 1] != b"#" else b"$") + content[at + 1 :])
    elif damage.endswith(("gone", "directory")):
        file.unlink()
    if damage.endswith("directory"):
        file.mkdir()  # fmt: skip


def names(folder):
    return {path.name for path in folder.iterdir() if path.name != "set_aside"} if folder.is_dir() else set()


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(checkpoints=st.dictionaries(st.integers(0, 200), st.tuples(DAMAGES, PLACES), max_size=6))
def test_a_run_starts_from_the_newest_checkpoint_without_damage_and_moves_only_what_is_damaged(checkpoints, tmp_path):
    folder = pathlib.Path(tempfile.mkdtemp(dir=tmp_path))
    for step, (damage, place) in checkpoints.items():
        make(folder, step, damage, place)
        if damage == "foreign":
            (folder / f"ckpt-{step}.commit").unlink()
    newest = max((step for step, (damage, _) in checkpoints.items() if damage in WHOLE), default=None)
    moved = {
        step for step, (damage, _) in checkpoints.items()
        if damage in LOST or (damage in TORN and (newest is None or step > newest))
    }  # fmt: skip
    before = names(folder)
    for tidy in (False, True):
        assert names(folder) == before
        found = commits.newest_intact(str(folder), tidy)
        assert (found and found.step) == newest
    assert names(folder) == {name for name in before if int(name[5:].split(".")[0]) not in moved}
    assert names(folder / "set_aside") == {f"ckpt-{step}" for step in moved}
    left = {step for step, (damage, _) in checkpoints.items() if damage != "foreign"} - moved
    assert [found.step for found in commits.listing(str(folder)) if found.commit] == sorted(left, reverse=True)
    assert commits.foreign(str(folder)) == sorted(set(checkpoints) - left - moved)

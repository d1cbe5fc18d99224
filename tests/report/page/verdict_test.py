"""The verdicts on a run, from curves of known shapes with known noise."""

import numpy as np
import pytest

from looplib.report.page.content import Run, SavedCheckpoint, best_metric
from looplib.report.page.curves import of_records
from looplib.report.page.verdict import findings
from looplib.run.policy import KeepBest
from looplib.run.records import Record

LEVELLED, OVERFITS, LABELS, LONGER = "levelled off", "it overfits", "each label belongs", "training longer"
CLAIMS = (LEVELLED, OVERFITS, LABELS, LONGER, "all of 20", "got worse", "hardly better", "loss rose", "did not fall")
FALLING = 0.7 * np.exp(-np.arange(60) / 15)  # a loss of the training
FLAT = np.full(60, 0.7)


def told(loss=(), train=(), keep=None, examples=None, saved=(), noise=0.0, seed=0, train_accuracy=(), **rates):
    """Returns what is said of evaluations with these values, and of a training with these losses."""
    random = np.random.default_rng(seed)
    count = max(map(len, [loss, *rates.values()]))
    known = {"loss": loss + noise * random.normal(size=len(loss))} if len(loss) else {}
    known |= rates if examples is None else {**rates, "examples": [examples] * count}
    records = [
        Record(60 * (place + 1) // count, "eval", {name: float(values[place]) for name, values in known.items()})
        for place in range(count)
    ]
    records += [Record(step, "train", {"loss": float(value)}) for step, value in enumerate(train, 1)]
    records += [Record(step, "train", {"accuracy": float(value)}) for step, value in enumerate(train_accuracy, 1)]
    found = of_records(records)
    metric, mode = best_metric(KeepBest.parse(keep) if keep else None, found)
    run = Run("run", "", status="done", curves=found, best_metric=metric, best_mode=mode, checkpoints=list(saved))
    return [f"{'✓' if one.kind == 'good' else '!'} {one.text} {one.advice}" for one in findings(run)]


def fall(count, low, high=5.0):
    return low + (high - low) * np.exp(-np.arange(count) / (count / 10))


def turn(count, low, end):
    """A loss that falls to a value in a third of the evaluations, and then rises to another one."""
    falling = count // 3
    return np.r_[fall(falling, low), np.linspace(low, end, count - falling)]


KINDS = {  # evaluations and a training; which of the claims are made; how many of 20 noises may be told otherwise
    "good and short": (dict(loss=[0.9, 0.5, 0.3], train=FALLING), [], 0),
    "still falling": (dict(loss=np.linspace(2, 1, 12), train=FALLING, noise=0.01), [LONGER], 0),
    "levelled off": (dict(loss=fall(40, 0.5), train=fall(60, 0.5), noise=0.01, examples=5000), [LEVELLED], 4),
    "a run that got worse": (dict(loss=[5.09, 1.2, 0.6, 0.58, 0.6, 0.63, 0.66], train=FLAT[:1]), [], 0),
    "worse, with more evaluations": (dict(loss=turn(30, 0.58, 0.66), noise=0.004, examples=5000), ["got worse"], 0),
    "noise alone": (dict(loss=np.full(20, 0.5), train=FALLING, noise=0.03), [], 2),
    "three examples": (dict(loss=turn(20, 0.5, 1.8), train=FALLING, noise=0.01, examples=3), [], 0),
    "400 examples, 1.5%": (dict(loss=turn(20, 0.5, 0.5075), train=FALLING, noise=0.0005, examples=400), [], 4),
    "overfits": (dict(loss=turn(20, 0.5, 0.9), train=FALLING, noise=0.01, examples=400), [OVERFITS], 0),
    "overfits from the first evaluation on": (
        dict(loss=np.linspace(0.59, 1.7, 20), train=FALLING, noise=0.01, examples=1000, accuracy=[0.69, 0.7] * 10),
        [OVERFITS],
        0,
    ),
    "labels of other examples": (
        dict(loss=np.linspace(0.72, 2.5, 20), train=FALLING, noise=0.01, examples=1000, accuracy=[0.49, 0.51] * 10),
        [LABELS],
        0,
    ),
    "labels of other examples, of a model that is too sure": (
        dict(
            loss=np.linspace(0.85, 2.5, 20),
            train=FALLING,
            noise=0.01,
            examples=1000,
            accuracy=[0.49, 0.51] * 10,
            train_accuracy=np.linspace(0.55, 1, 60),
        ),
        [LABELS],
        0,
    ),
    "nothing is trained": (
        dict(loss=np.full(20, 0.7), train=FLAT, accuracy=[0.49] * 20),
        ["all of 20", "did not fall"],
        0,
    ),
    "labels of three other examples": (
        dict(loss=np.linspace(0.72, 2.5, 20), train=FALLING, noise=0.01, examples=3, accuracy=[0.33, 0.67] * 10),
        [],
        0,
    ),
    "labels that no model learns": (
        dict(loss=np.full(12, 0.696), train=FLAT, noise=0.001, examples=1000, accuracy=[0.49, 0.51] * 6),
        ["hardly better", "did not fall"],
        0,
    ),
    "diverges": (
        dict(loss=np.r_[2, 1, 0.5, np.geomspace(0.6, 900, 9)], train=np.geomspace(0.5, 900, 60)),
        ["got worse", "loss rose"],
        0,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_is_made_where_a_curve_shows_more_than_noise(kind):
    shape, expected, most = KINDS[kind]
    others = 0
    for seed in range(20):
        text = " ".join(told(**shape, seed=seed))
        others += [claim for claim in CLAIMS if claim in text] != expected
    assert others <= most, text


def test_a_run_that_ends_worse_than_its_best_has_no_tick():
    (text,) = told(*KINDS["a run that got worse"][0].values())
    assert text.startswith("! eval/loss was best at step 34 (0.58), and 0.66 at the end. ")
    (text,) = told([0.1, 0.9, 0.5], [], "max:eval/loss")
    assert text.startswith("! ")


def test_training_loss_that_has_come_to_rest_is_no_trouble():
    random = np.random.default_rng(0)
    rest = [told([1.0], np.r_[3.0, 1.0, np.ones(60)] + 0.1 * random.normal(size=62)) for _ in range(50)]
    assert sum(map(len, rest)) <= 2
    (text,) = told([1.0], np.linspace(1, 2, 40) + 0.1 * random.normal(size=40))
    assert "Training loss rose: median" in text


def test_a_rate_that_says_of_every_example_the_same_is_told():
    zeros, losses = np.zeros(6), np.linspace(1, 0.3, 6)
    text, *_ = told(losses, recall=[0.2, *zeros[1:]], f1_score=zeros, accuracy=np.full(6, 0.95), examples=1000)
    for clause in ("eval/recall 0 in the last 5", "eval/f1_score 0 in the last 6", "eval/accuracy 0.95 in the last 6"):
        assert clause in text
    for values in ([0.0, 0.0], np.ones(6), [0.0, 0.0, 0.0, 0.2]):
        assert "Unchanged" not in " ".join(told(losses[: len(values)], recall=values, examples=1000))
    assert "Unchanged" not in " ".join(told(losses, accuracy=np.full(6, 0.67), examples=3))
    shape = dict(recall=[1, 0.4, 0.5, 0.6, 0.6], keep="max:eval/recall", examples=1000)
    (text,) = told(precision=[0.05, 0.5, 0.6, 0.6, 0.6], **shape)
    assert "where eval/precision was lowest" in text and "judge it by another metric" in text
    assert "it got worse" in told(precision=[0.9, 0.5, 0.6, 0.6, 0.6], **shape)[0]


def test_advice_names_the_flag_that_a_run_lacks():
    shape = KINDS["overfits"][0]
    (text,) = told(**shape)
    assert "(--keep_best=min:eval/loss, --checkpoint=best)" in text
    (text,) = told(**shape, saved=[SavedCheckpoint(20, None, None, {}, "eval/loss", "")])
    assert "Use the best checkpoint (--checkpoint=best), train less long" in text

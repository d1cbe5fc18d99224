"""Which of two values of a metric is better."""

import re

from looplib.errors import UsageError

# Words of a metric's name, between "/", "_" and the like, that say which of two values is better.
_LESS = set("loss losses error err mae mse rmse mape perplexity ppl nll wer cer fid".split())
_MORE = set("accuracy acc auc precision recall f1 bleu rouge map ap iou miou dice psnr ssim r2".split())


def mode_of(who: str, metric: str, mode: str | None) -> str:
    """Returns "max" or "min", which of two values of a metric such as "eval/accuracy" is better.

    A mode of None is read from the metric's name. `UsageError`, with the class `who` that was given the metric, if the
    metric has another form, or its name does not decide it.
    """
    if mode not in ("max", "min", None) or not isinstance(metric, str) or "/" not in metric:
        raise UsageError(
            f"{who} got the metric {metric!r} and the mode {mode!r}; expected <evaluator>/<metric>, "
            'such as "eval/accuracy", and "max" or "min"'
        )
    if mode is not None:
        return mode
    words = set(re.split(r"[^a-z0-9]+", metric.partition("/")[2].lower()))
    less, more = bool(words & _LESS), bool(words & _MORE)
    if less == more:
        raise UsageError(
            f"{who} got the metric {metric!r} without a mode, and the name does not imply whether "
            'higher or lower is better; give "max" or "min"'
        )
    return "min" if less else "max"

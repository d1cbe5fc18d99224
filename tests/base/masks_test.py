"""Secrets: neither they nor parts of them are in any text that leaves looplib, and harmless text stays as it is."""

import base64
import html
import io
import json
import logging as loggers
import re
import shlex
import string
import subprocess
import sys
import time
import urllib.parse

import pytest
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from looplib import masks
from looplib.base import console, messages
from looplib.errors import SettingError
from looplib.masks import MASK, masked, masked_text

RARE = "QZXJVK"  # no text around a secret has two of them in a row
LETTERS = RARE + string.digits
ANY, WORD, PLAIN = " @/'\"#?&;,:=%+\\|!)}]<>" + LETTERS, "@/#?&:%+|!.-_~" + LETTERS, "-_." + LETTERS


def secrets(alphabet):
    """Texts of an alphabet of which each four characters have two that are rare."""
    pairs = st.tuples(st.sampled_from(RARE), st.sampled_from(RARE), st.sampled_from(alphabet))
    return st.lists(pairs, min_size=4, max_size=12).map(lambda found: "".join(map("".join, found)))


def restore(known):
    masks._known.clear()
    masks._known.update(known)


def parts(secret):
    return {secret[start : start + 4] for start in range(len(secret) - 3)}


def leaks(secret, text):
    return {part for part in parts(secret) if part in text}


FORMS = {
    ANY: [
        "cannot connect to postgres://me:{}@db:5432/x, tried again",
        "redis://:{}@h/0",
        "password: {}",
        "  aws_secret_access_key = {}",
        "Authorization: Basic {}",
        "proxy-authorization: {}", "password: |\n  {}\nlr: 1", "token => {}", "PASSWORD_2: {}", "OPENAI_KEY: {}",
    ],
    WORD: [
        "https://h/x?key={} failed", "https://h/x?sv=1&sig={}", "https://h/x#access_token={}", "GET /x?code={} HTTP/1.1",
        "PGPASSWORD={}", "githubtoken={}", "KAGGLE_KEY={}", "login a password {}", "API key: {}",
        "Incorrect API key provided: {}", "Max retries exceeded with url: /services/T0/{} (Caused by x)", "slack://A/B/{}",
        "{'alert': ['https://a/x', 'https://h/{}']}", "MY_ALERT=https://h/{}", "<password value={}>",
        "\x1b[31mpassword\x1b[0m: {}", "api_keys:\n- a\n- {}\n", "auth:\n  user: me\n\n  value: {}\n",
        "https://h/x?X-Amz-Credential=AKIA&X-Amz-Signature={}", "https://hooks.slack.com/services/T0/B0/{} is gone",
        "https://discord.com/api/webhooks/1/{}", "https://api.telegram.org/bot{}/sendMessage", "Bearer {} is wrong",
        "'headers': 'bearer {}'", "HF_TOKEN={} python x", "--api_key={} --a=b", "run --token {} --step=3", "me:{}@host",
        "token%3D{}", "//me:{}@host", "<password>{}</password>", "curl -u me:{} x",
        "Server=db;Password={};a=b", "DefaultEndpointsProtocol=https;AccountKey={}==", "SharedAccessKey={}", "wandb_key={}",
        "SharedAccessSignature={}", "--auth {}", "--alert https://{}", "AWSAccessKeyId={}", "https://h/x;password={}",
    ],
    PLAIN: [
        "https://{}@github.com/x", "https://{}:@api.stripe.com/x", "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    ],
    LETTERS: ["Signature={}9a", "sk_live_{}QQQQ", "AKIA{}", "xoxb-{}", "ghp_{}", "hf_{}QQQQ", "eyJ{}.{}.QQ"],
}  # fmt: skip
WRITTEN = [  # as programs write any text
    lambda secret: json.dumps({"step": 3, "password": secret, "loss": 1}),
    lambda secret: repr({"api_key": secret, "loss": 1}),
    lambda secret: f"Config(n=1, secret={secret!r})",
    lambda secret: f"db_password: str = {secret!r}",
    lambda secret: repr([("password", secret), ("loss", 1)]),
    lambda secret: f"the token is {secret!r}, which is wrong",
    lambda secret: shlex.join(["prog", "--token", secret, "--step=3"]),
    lambda secret: shlex.join(["prog", f"--config.db.password={secret}"]),
    lambda secret: repr(["prog", "--token", secret]),
    lambda secret: f"password: '{secret.replace(chr(39), 2 * chr(39))}'",  # YAML
    lambda secret: f"next=https%3A%2F%2Fme%3A{urllib.parse.quote(secret, safe='')}%40host",
    lambda secret: f'password = """\n{secret.replace(chr(34), "")}\n"""',
    lambda secret: f"auth = ('me', {secret!r}, [{secret!r}])",
    lambda secret: f"password = 'a' + {secret!r}",
    lambda secret: f"set_password({secret!r})",
    lambda secret: f"the token {secret!r} is wrong",
    lambda secret: repr({"name": "password", "value": secret}),
    lambda secret: json.dumps(json.dumps({"password": secret})),
    lambda secret: f"pg://me:{urllib.parse.quote(secret, safe='')}@host/db",
]


EXACT = settings(max_examples=300, deadline=None, derandomize=True)
RANDOM = settings(max_examples=5000, deadline=None)
of_any_form, as_written = given(st.data()), given(secrets(ANY), st.sampled_from(WRITTEN))


@EXACT
@of_any_form
def test_no_part_of_a_secret_is_left_in_any_form_of_text(data):
    alphabet = data.draw(st.sampled_from(list(FORMS)))
    secret = data.draw(secrets(alphabet))
    text = data.draw(st.sampled_from(FORMS[alphabet])).replace("{}", secret)
    shown = masked_text(text)
    assert not leaks(secret, shown) and MASK in shown, (text, shown)
    assert masked_text(shown) == shown


@pytest.mark.slow
@RANDOM
@of_any_form
def test_no_part_of_a_random_secret_is_left_in_any_form_of_text(data):
    test_no_part_of_a_secret_is_left_in_any_form_of_text.hypothesis.inner_test(data)


@EXACT
@as_written
def test_no_part_of_a_secret_is_left_in_what_programs_write(secret, write):
    shown = masked_text(write(secret))
    assert not leaks(secret, shown), (write(secret), shown)
    assert masked_text(shown) == shown


@pytest.mark.slow
@RANDOM
@as_written
def test_no_part_of_a_random_secret_is_left_in_what_programs_write(secret, write):
    test_no_part_of_a_secret_is_left_in_what_programs_write.hypothesis.inner_test(secret, write)


TREES = [
    lambda secret: {"database": {"password": secret}},
    lambda secret: {"command": ["prog", "--token", secret]},
    lambda secret: ["prog", f"--config.api_key={secret}"],
    lambda secret: {"webhook_url": [secret]},
    lambda secret: {"url": f"pg://me:{secret}@host/db"},
    lambda secret: ["prog", f"--config.url=pg://me:{secret}@host/db"],
    lambda secret: {"password": secret.encode()},
    lambda secret: {"api_keys": {secret: 1}},
    lambda secret: {"passwords": {secret}},
    lambda secret: {"env": [{"name": "HF_TOKEN", "value": secret}]},
    lambda secret: ["prog", "--config=" + json.dumps({"api_key": secret})],
]
LATER = [
    "it is {} that is wrong", "a{}b", "\n{}\n",
    repr, json.dumps, html.escape, shlex.quote, urllib.parse.quote_plus, urllib.parse.quote,
    lambda secret: urllib.parse.quote(secret, safe="").lower(), lambda secret: "".join(f"&#{ord(one)};" if one in " @/'\"?" else one for one in secret),
    lambda secret: secret.replace("'", "''"), lambda secret: secret.replace(" ", "\n    "), lambda secret: repr(secret.encode()),
]  # fmt: skip
settings_later = given(
    secrets(ANY + "ü€\n😀").filter(lambda secret: re.search("[^A-Za-z_]", secret)),  # a key of letters is a name
    st.sampled_from(TREES), st.lists(st.sampled_from(LATER), min_size=1, max_size=3),
)  # fmt: skip


@settings(EXACT, max_examples=100)
@settings_later
def test_no_part_of_a_setting_is_left_in_the_settings_or_in_any_later_text(secret, tree, later):
    known, text = {**masks._known}, secret
    try:
        assert not leaks(secret, json.dumps(masked(tree(secret))))
        for write in later:  # each of what the one before wrote
            text = write(text) if callable(write) else write.replace("{}", text)
        assert not leaks(secret, masked_text(text)), (text, masked_text(text))
    finally:
        restore(known)


@pytest.mark.slow
@RANDOM
@settings_later
def test_no_part_of_a_random_setting_is_left_in_the_settings_or_in_any_later_text(secret, tree, later):
    inner = test_no_part_of_a_setting_is_left_in_the_settings_or_in_any_later_text.hypothesis.inner_test
    inner(secret, tree, later)


def through_log(text):
    stream = io.StringIO()
    handler = loggers.StreamHandler(stream)
    logging.get_absl_logger().addHandler(handler)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logging.exception("it failed: %s", text)
    finally:
        logging.get_absl_logger().removeHandler(handler)
    return stream.getvalue()


def through_log_of_another_package(text):
    record = loggers.getLogger("another").makeRecord("another", loggers.ERROR, "", 1, "at %s", (text,), None)
    assert logging.get_absl_handler().python_handler.filter(record)
    return record.getMessage()


def through_say(text):
    stream = io.StringIO()
    console.say(text, stream)
    return stream.getvalue()


DOORS = {
    "an error": lambda text: str(SettingError(text)) + SettingError(text).line,
    "the gist of an error": lambda text: messages.gist(RuntimeError(text)) + messages.with_cure(OSError(text)),
    "the gist of a KeyError": lambda text: messages.gist(KeyError(text)),
    "a value in a sentence": lambda text: messages.shown(text),
    "a log": through_log,
    "a log of another package": through_log_of_another_package,
    "a line": through_say,
    "a printed line": console.printable,
}


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(secret=secrets(ANY))
def test_no_part_of_a_secret_passes(door, secret):
    long = "x" * 80 + f" cannot reach pg://me:{secret}@host/db"  # of which some are cut
    assert not leaks(secret, DOORS[door](long)), DOORS[door](long)


@pytest.mark.slow
def test_errors_that_nobody_catches_are_masked(python, tmp_path):
    program = (
        "import threading, looplib.masks as masks; masks.mask_tracebacks()\n"
        "def fail(): raise RuntimeError('at pg://me:hunter2@host')\n"
        "import warnings; warnings.warn('at pg://me:hunter3@host')\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join(); fail()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("RuntimeError: at pg://<masked>@host") == 2
    assert "UserWarning: at pg://<masked>@host" in done.stderr and "hunter3@" not in done.stderr
    assert "hunter2@" not in done.stderr.replace("def fail(): raise RuntimeError('at pg://me:hunter2@host')", "")


@pytest.mark.parametrize("name", ["password", "db.password", "apiKey", "API_KEY", "hf_token", "token", "client-secret",
                                  "aws_secret_access_key", "dbPassword", "auth_tokens", "credentials", "AccountKey",
                                  "aws_access_key_id", "auth", "webhook_url", "alert", "SharedAccessKey"])  # fmt: skip
def test_names_of_secrets(name):
    assert masks.is_secret(name)
    assert masked({name: ["secret", 3, 12345678, True, ""]}) == {name: [MASK, 3, MASK, True, ""]}


@pytest.mark.parametrize("name", ["num_tokens", "max_tokens", "pad_token", "tokenizer", "passes", "key", "image_key",
                                  "password_file", "monkey", "tokens", "author", "signature", "alert_when"])  # fmt: skip
def test_names_of_no_secrets(name):
    assert masked({name: "value"}) == {name: "value"}


@pytest.mark.parametrize("text", [
    "step=3, key=loss, lr: 0.1, tokens_per_second=5.2", "s3://bucket/run@8 has ckpt-8; gs://b/data-?????-of-00008",
    "mail to me@example.org at 12:30", "http://127.0.0.1:6080/ shows the runs in /tmp/a@b; Ctrl-C ends",
    "grpc://10.0.0.1:8470: mail a@b.org", "abfs://container@account.dfs.core.windows.net/run", "/tmp/key/token/x.py:3",
    "see https://example.org/docs/errors.md#settings", "pad_token='<pad>' eos_token: </s>", "max_tokens=5 --key=loss",
    "give --token, or set TOKEN", "--api_key is missing", "if token == 3:", "def f(token: str, n: int = 3):", "Basic training",
    "expected postgresql+psycopg://USER@HOST/DATABASE", "http://[::1]:9/x", "[train] loss: 3; C:\\x", "bearer tokens are",
    "--alert has a value that is no URL", "token 12 of 16", "the key: value", "session=3", "bypass=1", "signature=(TensorSpec",
    "monkey: 3", "pad_token <pad>", "the tokens 'a' and 'b'", "pipeline://x/y",
"InvalidToken: The provided token is malformed", "password: None, token=None)",
])  # fmt: skip
def test_harmless_text_stays(text):
    assert masked_text(text) == text


@pytest.mark.parametrize("user", ["", "u", "me"])
def test_a_setting_is_masked_in_base64(user):
    known = {**masks._known}
    try:
        masked({"password": "QZXJVK-12345"})
        coded = base64.b64encode(f"{user}:QZXJVK-12345".encode()).decode()
        assert not leaks(coded[4:-4], masked_text(f"sent {coded} to h"))
    finally:
        restore(known)


def test_names_that_are_secrets_by_chance_stay_keys():
    known = {**masks._known}
    try:
        assert masked({"password": "status"}) == {"password": MASK}
        assert masked({"status": "done", "pg://me:x@h": 1}) == {"status": "done", f"pg://{MASK}@h": 1}
    finally:
        restore(known)


def test_what_is_masked_leaves_the_rest_readable():
    assert masked_text("Config(api_key='x', n=1) --password=x y://u:x@h") == (
        "Config(api_key=<masked>, n=1) --password=<masked> y://<masked>@h"
    )
    assert masked_text("https://me:a@h:8/x/y?token=1 gave 403") == "https://<masked>@h:8/x/y?<masked> gave 403"


def test_a_text_is_masked_in_linear_time():
    for text in ("a" * 10**5, "a_" * 10**4, "a://" * 10**4, "--" * 10**4, "?" * 10**4, "x://" + "?" * 10**4,
                 "x://" + "a:" * 10**4, "'" * 10**4, "key: " * 10**4, "& " * 10**4, "1" * 10**5, "eyJ-" * 10**4,
                 "sig=" * 10**4, "token" + " " * 10**5, "token" + "\\" * 10**5, "Bearer" + "\t" * 10**5,
                 "token='x', " * 10**4, "<token a=" * 10**4, "aB" * 10**4, "\x1b[31m" * 10**4):  # fmt: skip
        masked_text(text)
    for text in ("token = '", "password:\n\n", "  auth:\n  x\n", "with url: /", "name=token value="):
        masked_text(text * 10**4)
    assert masked_text("a" * 10**6) == "a" * 10**6
    assert masked_text("token: " * 10**5) == "token: <masked>"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("piece", ["a word of prose\n", "a", "aB", "aA1_", "'", "\\", "//a:b", "x://a@", "eyJ-", "sig=",
                                   "token='x', ", "token \t", "<token a=", "Bearer ", "QQ' ", "Q@Q@"])  # fmt: skip
def test_a_megabyte_is_masked_in_a_second(piece):
    text, known = (piece * (10**6 // len(piece) + 1))[: 10**6], {**masks._known}
    masked({"password": ["QQ' \"\\ QQ@@QQ%&QQ", "' QQ' ' ' ' ' QQQQQQ", "Q@Q@Q@Q@Q@Q-"]})
    masked_text(text[:1000])  # to compile the patterns
    try:
        start = time.process_time()
        masked_text(text)
        assert time.process_time() - start < 2  # 1 s where nothing else runs
    finally:
        restore(known)

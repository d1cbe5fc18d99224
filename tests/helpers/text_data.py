"""Toy data for Model Garden's text experiments: the docstrings of a few modules of Python's standard library."""

import functools
import json
import pathlib

from trainers import small_data

SEQ_LENGTH = 32
PREDICTIONS = 5
# Short sequences have a bucket of their own where their lengths may differ.
BUCKETS = ((16, 3), (SEQ_LENGTH, PREDICTIONS))
VOCAB_SIZE = 300
MODULES = ("email", "asyncio")
TAGS = ("O", "B-NAME", "I-NAME")

_TRAIN, _VALIDATION = 48, 18


@functools.cache
def documents():
    """The documents of each module: {module: [[sentence, ...], ...]}."""
    return {module: small_data.read_documents(module) for module in MODULES}


def sentences():
    """(sentence, index of its module) pairs, of all modules in turn."""
    each = [[sentence for document in documents()[module] for sentence in document] for module in MODULES]
    return [(sentence, label) for row in zip(*each) for label, sentence in enumerate(row)]


def _write_vocab(directory):
    path = pathlib.Path(directory, "vocab.txt")
    return path, small_data.write_vocab(path, [sentence for sentence, _ in sentences()], VOCAB_SIZE)


def _vocab_paths(path, tokenizer):
    return {"vocab": str(path), "vocab_size": len(tokenizer.vocab)}


def _write_splits(directory, examples, num_validation=_VALIDATION):
    """Writes the first examples to train on and the next to validate on."""
    train, validation = pathlib.Path(directory, "train.tfrecord"), pathlib.Path(directory, "validation.tfrecord")
    small_data.write_records(train, examples[:_TRAIN])
    num_validation = small_data.write_records(validation, examples[_TRAIN : _TRAIN + num_validation])
    return {"train": str(train), "validation": str(validation), "num_validation": num_validation}


def _masked(tokenizer, buckets):
    every = [document for module in MODULES for document in documents()[module]]
    return list(small_data.masked_lm_examples(every, tokenizer, buckets))


def masked_lm(directory):
    """Sentence pairs with masked words, all padded to SEQ_LENGTH."""
    path, tokenizer = _write_vocab(directory)
    examples = _masked(tokenizer, [(SEQ_LENGTH, PREDICTIONS)])
    return {**_vocab_paths(path, tokenizer), **_write_splits(directory, examples)}


def masked_lm_dynamic(directory):
    """The same; training examples are padded to the lengths of BUCKETS, those of the validation to SEQ_LENGTH."""
    path, tokenizer = _write_vocab(directory)
    paths = {**_vocab_paths(path, tokenizer), **masked_lm(directory)}
    small_data.write_records(paths["train"], _masked(tokenizer, BUCKETS)[:_TRAIN])
    return paths


def sentence_prediction(directory):
    """Sentences as word pieces, with the module that they come from."""
    path, tokenizer = _write_vocab(directory)
    examples = list(small_data.sentence_examples(sentences(), tokenizer, SEQ_LENGTH))
    return {**_vocab_paths(path, tokenizer), **_write_splits(directory, examples)}


def sentence_prediction_text(directory):
    """The same as strings, `sentence`, with `label`."""
    path, tokenizer = _write_vocab(directory)
    examples = [
        {"sentence": small_data.bytes_feature(sentence), "label": small_data.int64_feature([label])}
        for sentence, label in sentences()
    ]
    return {**_vocab_paths(path, tokenizer), **_write_splits(directory, examples)}


def question_answering(directory):
    """SQuAD 1.1: the word that follows two others in a paragraph. Validation data is the JSON file, as for SQuAD."""
    from official.nlp.data import squad_lib

    vocab, tokenizer = _write_vocab(directory)
    files = {}
    for name, start, count in (("train", 0, _TRAIN), ("validation", _TRAIN, _VALIDATION)):
        paragraphs = [_question(i, sentence) for i, (sentence, _) in enumerate(sentences()[start : start + count])]
        files[name] = pathlib.Path(directory, f"{name}.json")
        files[name].write_text(json.dumps({"version": "1.1", "data": [{"title": name, "paragraphs": paragraphs}]}))
    train = str(pathlib.Path(directory, "train.tfrecord"))
    squad_lib.generate_tf_record_from_json_file(
        str(files["train"]), str(vocab), train, max_seq_length=SEQ_LENGTH, max_query_length=8, doc_stride=16
    )
    return {**_vocab_paths(vocab, tokenizer), "train": train, "validation": str(files["validation"])}


def _question(number, sentence):
    words = sentence.rstrip(".").split()
    place = 2 + number % (len(words) - 2)
    answer = {"text": words[place], "answer_start": len(" ".join(words[:place])) + 1}
    question = f"what follows {words[place - 2]} {words[place - 1]}"
    return {"context": sentence, "qas": [{"id": f"question-{number}", "question": question, "answers": [answer]}]}


def tagging(directory):
    """Words tagged by whether they start with a capital letter: names, the first of several as B-, others as I-."""
    from official.nlp.data import tagging_data_lib

    path, tokenizer = _write_vocab(directory)
    examples = []
    for number, (sentence, _) in enumerate(sentences()[: _TRAIN + _VALIDATION]):
        example, before = tagging_data_lib.InputExample(sentence_id=number), "O"
        for word in sentence.split():
            tag = "O" if not word[0].isupper() else "B-NAME" if before == "O" else "I-NAME"
            example.add_word_and_label_id(word, TAGS.index(tag))
            before = tag
        examples.append(example)
    paths = _vocab_paths(path, tokenizer)
    for name, part in (("train", examples[:_TRAIN]), ("validation", examples[_TRAIN:])):
        paths[name] = str(pathlib.Path(directory, f"{name}.tfrecord"))
        tagging_data_lib.write_example_to_file(part, tokenizer, SEQ_LENGTH, paths[name])
    return paths


def text_documents(directory):
    """Documents as strings, `text`, a sentence a line; the loader makes pairs and masks them."""
    path, tokenizer = _write_vocab(directory)
    every = [document for module in MODULES for document in documents()[module] if len(document) > 1]
    examples = [{"text": small_data.bytes_feature("\n".join(document))} for document in every]
    paths = _vocab_paths(path, tokenizer)
    for name, part in (("train", examples), ("validation", examples[:2])):
        paths[name] = str(pathlib.Path(directory, f"{name}.tfrecord"))
        small_data.write_records(paths[name], part)
    return paths


def translation(directory):
    """Sentences, `en`, and their words in reverse order, `back`; and a model of sentencepiece for both."""
    import sentencepiece

    model = pathlib.Path(directory, "sentencepiece")
    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    # Sentences short enough for the longest sequence, even in pieces of few letters.
    pairs = [(sentence, " ".join(reversed(sentence.split()))) for sentence, _ in sentences() if len(sentence) < 60]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for pair in pairs for text in pair),
        model_prefix=str(model),
        vocab_size=VOCAB_SIZE,
        # As Model Garden's trainer of such models sets them.
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    examples = [{"en": small_data.bytes_feature(en), "back": small_data.bytes_feature(back)} for en, back in pairs]
    return {**_write_splits(directory, examples, num_validation=8), "sentencepiece": f"{model}.model"}


def nothing(directory):
    """The mock experiment makes its data itself."""
    return {}

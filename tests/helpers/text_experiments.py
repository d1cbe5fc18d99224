"""Every text experiment that Model Garden registers, and its mock, at the size of a toy."""

import text_data
from experiment import Experiment

BATCH = 4
STEPS = 3

_BERT = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": text_data.SEQ_LENGTH,
}
_SEQUENCE = {"seq_length": text_data.SEQ_LENGTH}
_MASKED = {**_SEQUENCE, "max_predictions_per_seq": text_data.PREDICTIONS}
_NEXT_SENTENCE = [{"inner_dim": 16, "num_classes": 2, "dropout_rate": 0.1, "name": "next_sentence"}]


def encoder(paths):
    """A BERT of one layer for the vocabulary of the data."""
    return {"type": "bert", "bert": {**_BERT, "vocab_size": paths["vocab_size"]}}


def whole(task, optimizer_config=None):
    """The overrides of an experiment: those of its task, three steps, one evaluation and one save."""
    trainer = {
        "train_steps": STEPS,
        "steps_per_loop": STEPS,
        "summary_interval": STEPS,
        "checkpoint_interval": STEPS,
        "validation_interval": STEPS,
        "validation_steps": -1,
        "optimizer_config": optimizer_config or _adamw(),
    }
    runtime = {"distribution_strategy": "one_device", "enable_xla": False}
    return {"task": task, "trainer": trainer, "runtime": runtime}


def _adamw():
    return {
        "learning_rate": {"polynomial": {"initial_learning_rate": 1e-3, "decay_steps": 10}},
        "warmup": {"polynomial": {"warmup_steps": 1}},
    }


def _data(paths, train=None, validation=None, **both):
    """The data of both splits: where it is, the size of a batch, and parameters of the loader."""
    return {
        "train_data": {
            "input_path": paths["train"],
            "global_batch_size": BATCH,
            "seed": 0,
            **both,
            **(train or {}),
        },
        "validation_data": {
            "input_path": paths["validation"],
            "global_batch_size": BATCH,
            "is_training": False,
            "drop_remainder": False,
            **both,
            **(validation or {}),
        },
    }


def _pretraining(paths):
    return whole({"model": {"encoder": encoder(paths), "cls_heads": _NEXT_SENTENCE}, **_data(paths, **_MASKED)})


def _pretraining_dynamic(paths):
    lengths = tuple(length for length, _ in text_data.BUCKETS)
    data = _data(paths, train={"seq_bucket_lengths": lengths}, validation=_MASKED)
    return whole({"model": {"encoder": encoder(paths), "cls_heads": _NEXT_SENTENCE}, **data})


def _text_wiki(paths):
    of_files = {"tfds_name": "", "tfds_split": "", "vocab_file_path": paths["vocab"], "doc_batch_size": 2}
    data = _data(paths, **_MASKED, **of_files)
    return whole({"model": {"encoder": encoder(paths), "cls_heads": _NEXT_SENTENCE}, **data})


def _electra(paths):
    model = {
        "num_masked_tokens": text_data.PREDICTIONS,
        "sequence_length": text_data.SEQ_LENGTH,
        "generator_encoder": encoder(paths),
        "discriminator_encoder": encoder(paths),
        "cls_heads": _NEXT_SENTENCE,
    }
    return whole({"model": model, **_data(paths, **_MASKED)})


def _classifier(paths):
    return {"num_classes": len(text_data.MODULES), "encoder": encoder(paths)}


def _sentence_prediction(paths):
    return whole({"model": _classifier(paths), **_data(paths, **_SEQUENCE)})


def _sentence_prediction_text(paths):
    of_text = {"text_fields": ["sentence"], "label_field": "label", "vocab_file": paths["vocab"]}
    return whole({"model": _classifier(paths), **_data(paths, **_SEQUENCE, **of_text)})


def _squad(paths):
    of_squad = {"vocab_file": paths["vocab"], "do_lower_case": True, "query_length": 8, "doc_stride": 16}
    data = _data(paths, **_SEQUENCE, **of_squad)
    return whole({"model": {"encoder": encoder(paths)}, "n_best_size": 5, **data})


def _tagging(paths):
    task = {"model": {"encoder": encoder(paths)}, "class_names": list(text_data.TAGS)}
    return whole({**task, **_data(paths, **_SEQUENCE)})


def _translation(paths):
    layers = {"num_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = {
        "encoder": layers,
        "decoder": layers,
        "embedding_width": 16,
        "decode_max_length": text_data.SEQ_LENGTH,
        "beam_size": 2,
    }
    of_pairs = {
        "tfds_name": "",
        "tfds_split": "",
        "src_lang": "en",
        "tgt_lang": "back",
        "max_seq_length": text_data.SEQ_LENGTH,
    }
    # The loader counts a training batch in tokens.
    data = _data(paths, train={"global_batch_size": BATCH * text_data.SEQ_LENGTH}, **of_pairs)
    optimizer_config = {
        "learning_rate": {"power": {"initial_learning_rate": 0.01}},
        "warmup": {"linear": {"warmup_steps": 1}},
    }
    return whole({"model": model, "sentencepiece_model_path": paths["sentencepiece"], **data}, optimizer_config)


def _mock(paths):
    constant = {"type": "constant", "constant": {"learning_rate": 0.1}}
    overrides = whole({}, {"optimizer": {"type": "sgd"}, "learning_rate": constant})
    # Its data never ends.
    overrides["trainer"]["validation_steps"] = 2
    return overrides


TEXT = {
    "bert/pretraining": Experiment(text_data.masked_lm, _pretraining),
    "bert/pretraining_dynamic": Experiment(text_data.masked_lm_dynamic, _pretraining_dynamic),
    "bert/text_wiki_pretraining": Experiment(text_data.text_documents, _text_wiki),
    "bert/sentence_prediction": Experiment(text_data.sentence_prediction, _sentence_prediction),
    "bert/sentence_prediction_text": Experiment(text_data.sentence_prediction_text, _sentence_prediction_text),
    "bert/squad": Experiment(text_data.question_answering, _squad),
    "bert/tagging": Experiment(text_data.tagging, _tagging),
    "electra/pretraining": Experiment(text_data.masked_lm, _electra),
    "wmt_transformer/large": Experiment(text_data.translation, _translation),
    "mock": Experiment(text_data.nothing, _mock),
}

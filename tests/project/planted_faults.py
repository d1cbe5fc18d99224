"""Faults planted one at a time, to see that the suite of `make test` catches each: `python tests/project/planted_faults.py`.

Each fault breaks one promise in one place of a copy of the project. The tests that are named for it run there first,
then their slow ones, and then, with `--all_tests`, whatever else `make test` has. A fault that no test finds is printed
as NOT CAUGHT.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

_MOST_SECONDS = 400  # of a test file
ROOT = pathlib.Path(__file__).absolute().parents[2]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
      promise: what it breaks.
      path: the file, in `looplib`.
      right: a piece of its text, which occurs once.
      wrong: what takes its place.
      tests: the names of the test files that should notice, without `_test.py`.
    """

    promise: str
    path: str
    right: str
    wrong: str
    tests: str


FAULTS = [
    Fault("replicas that differ are found", "actions/replica_agreement.py", "if (sums == sums[:1]).all():", "if True:", "agreement"),
    Fault("no checkpoint hides a difference", "loop/task_loop.py", "            addition.check_state()\n", "            pass\n", "agreement"),
    Fault("a rollback from what a device did repeats the data", "checkpoint/checkpointer.py",
          "after = target.step if fault.repeats else fault.resume_after", "after = fault.resume_after", "agreement"),
    Fault("a tensor that each trace assigns is no change", "loop/step_checks.py",
          "        if tf.is_symbolic_tensor(value):\n            continue\n", "", "traced"),
    Fault("weights that stand still are found", "actions/weight_checks.py", "        if track.checks < _STILL or",
          "        if True or", "weights"),
    Fault("large weights that a small update does not change are no fault", "actions/weight_checks.py",
          "any(_smallest(other) * _FINER >= _smallest(one) for other in others)", "True", "weights"),
    Fault("a check of predictions leaves no trace", "actions/output_checks.py", "if _tf.updated_by(traced) or types", "if types", "outputs"),
    Fault("a controller without actions warns", "controller.py",
          "            actions = [LearningWarnings()]\n", "            actions = []\n", "learning_warnings"),
    Fault("a warning comes once over restarts", "actions/learning_warnings.py",
          "            self._known.update(_earlier(controller.report.path))\n", "", "learning_warnings"),
    Fault("the repetition of an interval compares every tensor", "commands/intervals.py", "for difference in compared.differences:",
          "for difference in compared.differences[:0]:", "intervals"),
    Fault("a notice ends a run", "actions/notices.py", "                preemption.request(str(told))",
          "                str(told)", "notices"),
    Fault("a span has the begin of its phase", "report/clock.py", "observe(self, name, began, self._mark)",
          "observe(self, name, self._mark, self._mark)", "opentelemetry"),
    Fault("each epoch has an order of its own", "data/order.py", "epoch, 0 * epoch], axis=1)",
          "0 * epoch, 0 * epoch], axis=1)", "inputs"),
    Fault("a resumed run starts at the next batch", "data/order.py",
          "first = self.start_step * self.replicas_per_pipeline\n",
          "first = (self.start_step + 1) * self.replicas_per_pipeline\n", "inputs"),
    Fault("a resumed run keeps the metrics since the last report", "checkpoint/recorded.py",
          "        self.loops.training.reducer.load(record.running)\n", "", "lifecycle checkpoints"),
    Fault("a resumed run keeps the memories of actions", "checkpoint/recorded.py",
          "        self._actions.load(record.actions)\n", "", "memories plateau"),
    Fault("any number of replicas comes to the same weights", "task/trainer.py",
          "return tf.reduce_sum(values) / tf.cast(self.global_batch_size, values.dtype)",
          "return tf.reduce_mean(values)", "conformance"),
    Fault("gradients of all replicas are summed", "cluster/updates.py",
          "        grads = over_replicas(grads)\n    with", "        pass\n    with",
          "optimizers"),
    Fault("a weighted mean uses its weights", "loop/packing.py", "if group[0].weight is not None:", "if False:", "metrics"),
    Fault("an evaluation has each example once", "data/streams.py",
          "needed = optionals[:1] if self.properties.may_be_empty else optionals", "needed = optionals", "evaluator feeds"),
    Fault("a step trains on a batch for each replica", "data/pipelines.py",
          "_drop_incomplete_steps(dataset, replicas) if training and not self._whole else dataset", "dataset",
          "feeds"),
    Fault("damage of a checkpoint's content is found", "run/commits.py",
          'expected["sha256"] if thorough else None', "None", "markers faults/files"),
    Fault("a damaged checkpoint is not used", "run/commits.py",
          'reason = found.reason or (verify(found.commit) if intact is None else "")', "reason = found.reason",
          "markers faults/files"),
    Fault("a checkpoint of other names is refused", "weights/restoring.py",
          "status.assert_consumed()", "status.expect_partial()", "names store checkpoints"),
    Fault("credentials that were renewed are used without a restart", "stores/stores.py",
          "self.files, _ = _found(self._url, self._seconds)", "_found(self._url, self._seconds)", "credentials"),
    Fault("a start without valid credentials ends at once", "stores/stores.py",
          "final = not self._driver.answered if refused", "final = False if refused", "credentials"),
    Fault("a store that is empty does not empty the local directory", "buckets/mirror.py",
          "if token and not before and here and not there:", "if False:", "halves"),
    Fault("what a store has lost is copied again", "buckets/download.py",
          "                known.pop(lost, None)\n", "                pass\n", "halves"),
    Fault("a later evaluation of a step holds", "buckets/upload.py",
          "            replaces = newest([name]) > known_jobs\n", "            replaces = False\n", "jobs"),
    Fault("--verify reads the store", "commands/commands.py",
          "(options.directory, unchecked=True)", "(options.directory)", "buckets/tools"),
    Fault("a process of a sweep keeps its trials while it lives", "sweep/study.py",
          "        for one in self._own - lost:\n            self._show_life(one)\n", "", "shared_sweep"),
    Fault("a trial whose process ended while it handed it over is taken again", "sweep/study.py",
          "return trial.state == TrialState.FAIL and _ERROR not in trial.user_attrs", "return False", "shared_sweep"),
    Fault("two writers do not have one URL", "buckets/lease.py",
          "            if holder != first:\n", "            if False:\n", "one_writer"),
    Fault("two processes do not write to one run", "run/lock.py",
          "fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "faults/lock"),
    Fault("the best checkpoints are kept", "run/metric_names.py", "key=lambda one: -one[0]", "key=lambda one: one[0]",
          "store choice"),
    Fault("saves are at multiples of their interval", "loop/contracts.py", "save=step % self.save_every == 0",
          "save=step % self.report_every == 0", "schedule"),
    Fault("a signal ends a run with exit code 75", "errors.py", "EXIT_STALLED = 0, 1, 75, 76", "EXIT_STALLED = 0, 1, 1, 76",
          "outcome preemption"),
    Fault("a signal ends a run after the current step", "loop/device_loop.py",
          "return Status(self._workers.any(notice.flag.read_value()), self.step.reducer.finite())",
          "return Status(self._workers.any(tf.constant(False)), self.step.reducer.finite())", "preemption"),
    Fault("a skipped step changes nothing", "loop/step.py", "variable.assign(tf.where(finite, new, old))",
          "variable.assign(new)", "guards"),
    Fault("a rollback leaves out the bad data", "checkpoint/checkpointer.py",
          "offset = after + self.record.input_offset - target.step", "offset = 0", "guards"),
    Fault("a silent worker is noticed", "cluster/peers.py", "elif link.silence > self.silence_limit:", "elif False:",
          "workers/peers"),
    Fault("a launch starts as many workers as are left", "processes/restarts.py", "if n <= places)",
          "if n <= self.most)", "tools/elastic"),
    Fault("workers join rows of any number", "cluster/collectives.py", "(number + 1, done.write(number, self._of_all(content[number])))",
          "(number + 1, done.write(number, self._of_all(content[0])))", "workers"),
    Fault("workers divide the global batch", "processes/restarts.py", "self.global_batch_size % n == 0]", "True]",
          "tools/elastic"),
    Fault("a run without progress is ended", "guards/watchdog.py", "elif paused > self.allowed(phase):", "elif False:",
          "preemption debuggers"),
    Fault("the clock adds up to the wall", "report/clock.py", "            self._close_span()\n            self._stack.pop()",
          "            self._stack.pop()", "clock"),
    Fault("two Keras families are not mixed", "compat/keras.py", "    if len(names) > 1:\n        found", "    if False:\n        found",
          "trainer controller keras_trainer"),
    Fault("a list of foreign JSON is bounded", "base/decoding.py", "value[: limits.items]", "value", "decoding"),
    Fault("a record stands once in metrics.jsonl", "run/records.py",
          "if self._key(record) in self._written or cut_short(self._path):", "if cut_short(self._path):", "writers"),
    Fault("clipping uses the norm of all gradients", "task/gradient_trainer.py",
          "gradients, _ = tf.clip_by_global_norm(gradients, self.global_norm)",
          "gradients = [tf.clip_by_norm(g, self.global_norm) for g in gradients]", "gradient_trainer"),
    Fault("averages decay as the formula says", "task/averages.py", "tf.cast(1 - self._decay, value.dtype)",
          "tf.cast(self._decay, value.dtype)", "derived gradient_trainer evaluator"),
    Fault("a phase moves only the averages of what it trains", "task/gradient_trainer.py",
          "self.averages.update([variable for variable in variables if id(variable) not in counted])",
          "self.averages.update()", "phases"),
    Fault("an average moves by updates and not by steps", "task/gradient_trainer.py",
          "when=tf.not_equal(one.iterations, count)", "when=None", "gradient_trainer"),
    Fault("a part of a batch weighs the losses of layers by its examples", "task/gradient_trainer.py",
          "auxiliary *= tf.cast(examples, target.dtype)", "auxiliary *= 4.0", "gradient_trainer"),
    Fault("a lookup that one device does once has one row", "cluster/updates.py",
          "summed[i] = _by_row(summed[i],", "_by_row(summed[i],", "optimizers"),
    Fault("the slots of a row begin anew with its owner", "compat/row_updates.py",
          "            rows._replace(ids=new).write(value)\n", "            pass\n", "dynamic_embedding"),
    Fault("a row that was seen since is not the oldest", "task/dynamic_embedding.py",
          "tf.gather(tf_variable(self.seen), places) < made", "places >= 0", "dynamic_embedding"),
    Fault("rows do not depend on how a batch is divided", "task/dynamic_embedding.py",
          "order = tf.argsort(new)", "order = tf.range(tf.size(new))", "dynamic_embedding"),
    Fault("what stands in for an example is not seen", "task/dynamic_embedding.py",
          "ids, counts = ids[:kept], counts[:kept]", "pass", "dynamic_embedding"),
    Fault("averages in use are put back for a save", "checkpoint/saving.py",
          "            with averages.at_rest():\n                self._save", "            if True:\n                self._save", "derived"),
    Fault("a phase sets its rate where it begins", "task/phases.py", "        if begins and rate is not None:\n",
          "        if step == 0 and rate is not None:\n", "phases"),
    Fault("no call of an inner loop crosses the end of a phase", "loop/phased_loop.py",
          "crosses = left is not None and not 0 <= rest.steps <= left", "crosses = False", "phases"),
    Fault("what a phase does not train keeps its moving statistics", "task/phases.py",
          "        for layer in self._layers:\n            layer.trainable = False\n", "", "phases"),
    Fault("statistics of averaged weights are means over batches", "replay/normalization.py", "(total / steps)",
          "total", "average"),
    Fault("records have the order of the run's seed", "data/records/reader.py",
          "seed = context.order_seed(plan, name)\n            may_be_by_pieces", "seed = 7\n            may_be_by_pieces",
          "records"),
    Fault("the rows of all replicas' gradients reach a table", "cluster/updates.py",
          "found = [tf.concat(local(part), axis=0) for part in (values, ids)]",
          "found = [local(part)[0] for part in (values, ids)]", "sharded_embedding"),
    Fault("a worker looks up the rows that it holds for all", "cluster/holders.py",
          "places = tf.where(first & is_here(everyones))[:, 0]", "places = tf.where(is_here(everyones) & (everyones < 0))[:, 0]", "tables"),
    Fault("an optimizer that the trainer does not hold updates no table", "cluster/updates.py",
          "if not several and not any(map(row_updates.is_table, variables)):", "if not several:", "sharded_embedding"),
    Fault("files that appear come in the order of their names", "data/records/follow.py",
          "names = sorted(sizes.keys() - taken.keys())", "names = [*(sizes.keys() - taken.keys())]", "follow"),
    Fault("a file that was replaced before it was read is found", "data/records/follow.py",
          "self._described(taken.name, source, taken.records) == taken", "True", "follow"),
    Fault("each batch that is there is located once", "data/records/follow.py",
          "self._next[entry] += len(positions)", "self._next[entry] += max(1, len(positions) - 1)", "follow"),
    Fault("a model that is worse than the served one is rejected", "actions/export_every.py",
          "gain(metrics[name], served.get(name), self.mode) >= -self.worse_by:", "True:", "served_versions"),
    Fault("an example is predicted before it is trained on", "actions/prequential.py",
          "            found = self._predicted(tf.nest.map_structure(lambda leaf: leaf, inputs))\n            outputs = step_fn(inputs)\n",
          "            outputs = step_fn(inputs)\n            found = self._predicted(tf.nest.map_structure(lambda leaf: leaf, inputs))\n",
          "prequential"),
    Fault("a worker of parameter servers that sees other files is refused", "data/records/on_workers.py",
          "if found := changes(order.fingerprint, fingerprint([source])):", "if found := []:", "on_workers"),
    Fault("workers leave out the damaged records of one process", "data/records/on_workers.py",
          "        if order.most:\n", "        if False:\n", "on_workers"),
    Fault("a trial that fails before it has a run directory is among the runs", "sweep/sweep.py",
          "        job.note_failure(sentence)\n", "", "sweep"),
    Fault("a trial without a finite value has failed", "sweep/sweep.py",
          '                job.note_end("failed", f"its trial has failed: {error}", self.plan)\n', "", "sweep"),
    Fault("why an action has ended a training stays with the run", "report/run_report.py",
          'console.first_fault(), self.stopped or ""', 'console.first_fault(), ""', "plateau"),
    Fault("a run of seconds is not told that its start took long", "report/clock.py",
          "        if not is_short and begun >", "        if begun >", "clock"),
    Fault("a sweep starts a killed run again", "sweep/jobs.py", "return self._idle < _IDLE_STARTS", "return False",
          "faults/sweep_faults"),
    Fault("an export computes in inference mode", "task/trainer.py", "Exported(lambda inputs: model(inputs, training=False)",
          "Exported(lambda inputs: model(inputs, training=True)", "exports"),
    Fault("weights that looplib writes are found by names counted from 0 on", "weights/layers.py",
          "targets.counted if counted else plain", "plain", "weights/writing"),
    Fault("what int8 costs is the mean over the data", "exports/int8.py",
          "self._sum += float(differences.sum())", "self._sum += float(differences.max())", "exports/export_formats"),
    Fault("secrets are masked", "masks.py", "return _IS_SECRET.fullmatch(", "return False and (", "faults/environment"),
    Fault("what stands before the host of a URL is masked", "masks.py", 'text = f"{MASK}{text[user.end() :]}"', "pass",
          "base/masks"),
    Fault("an error shows no secret", "errors.py", "masked_text(super().__str__())", "super().__str__()", "base/masks"),
    Fault("an alert is sent with the password of its address", "report/alerts.py",
          "self._headers[\"Authorization\"] = ", "_ = ", "alerts"),
    Fault("a verdict on a loss needs more than chance makes of its examples", "report/page/verdict.py",
          "surely_lost > max(noise, chance, slight", "surely_lost > max(noise, slight", "verdict"),
    Fault("the page marks the checkpoint that --checkpoint=best takes, and none without a rule", "report/page/content.py",
          "saved = _checkpoints(directory, rule,", "saved = _checkpoints(directory, KeepBest(metric, mode),", "report_page"),
    Fault("a page runs no foreign script", "report/page/html.py", r'text).replace("<", "\\u003c")', "text)",
          "report_page"),
    Fault("seeds of augmentation differ from example to example", "data/order.py",
          "words = mix(tf.bitcast(tf.reshape(positions, [-1]), tf.uint64) + key)",
          "words = mix(tf.bitcast(0 * tf.reshape(positions, [-1]), tf.uint64) + key)", "inputs"),
    Fault("nothing is written outside of the run directory", "run/directory.py",
          '        folders.check_folder(os.path.join(model_dir, name.rstrip("/")))', "        pass", "faults/hostile"),
    Fault("the newest checkpoint is kept by any rules", "checkpoint/saving.py", "for done in kept[1:]:", "for done in kept:", "store"),
    Fault("a learning rate that an action has changed is restored", "task/learning_rates.py",
          "if recorded.get(path, rate) != rate:", "if True:", "lifecycle"),
    Fault("sums of metrics resume on fewer replicas", "loop/reducer.py", "if len(totals) != replicas:",
          "if len(totals) < replicas:", "loop/metrics"),
    Fault("what each replica keeps for itself is restored", "checkpoint/checkpointer.py",
          "                self._replica_state.apply()\n", "                pass\n", "store"),
    Fault("adaptive clipping has the units of the paper", "task/gradient_trainer.py",
          "axes = list(range(value.shape.rank - 1)) if", "axes = list(range(1, value.shape.rank)) if", "gradient_trainer"),
    Fault("an overflow ends a row of good steps", "task/gradient_trainer.py",
          "tf.where(finite, self._good_steps + 1, tf.zeros_like(self._good_steps))", "self._good_steps + 1",
          "gradient_trainer"),
    Fault("a time limit does not end the next training", "cluster/preemption.py",
          '                self.requested = ""\n                self.flag.assign(False)\n', '                self.requested = ""\n',
          "limits"),
    Fault("a saved position has the batches that were read ahead", "data/block_stream.py",
          "        self._buffer.put(rest)\n        return True", "        return True", "engines"),
    Fault("a pipeline that skips leaves out no batch that was read together with used ones", "data/block_stream.py",
          "self._buffer.put(parts, tf.minimum(used, tf.shape(parts[0])[0]))", "self._buffer.put(parts)", "engines"),
    Fault("a resumed run is not initialized again", "checkpoint/checkpointer.py",
          "            self._restore_start(directory.starts_from.path)\n",
          "            self._restore_start(directory.starts_from.path)\n            trainer and trainer.initialize()\n",
          "store"),
    Fault("a second rollback leaves out the data of the first too", "checkpoint/checkpointer.py",
          "offset = after + self.record.input_offset - target.step", "offset = after - target.step", "guards"),
    Fault("a jump is one among the last losses", "guards/guards.py", "    del losses[: -guards.spike_window]\n", "", "guards"),
    Fault("averages start from the weights of the start", "task/state.py",
          "        starts = [tf.identity(variable) for variable, _ in pairs]\n", "", "derived"),
    Fault("uneven parts of a batch have all its examples", "task/micro_batches.py",
          "-(-each * size // count) for", "each * (size // count) for", "gradient_trainer"),
    Fault("a last value over the parts of a batch is that of the first", "task/micro_batches.py",
          'if value.kind == "last":', 'if value.kind == "none":', "gradient_trainer"),
    Fault("a rule transposes the weights that it names", "weights/pairing.py",
          "            value = value.transpose(self.form.transpose)\n", "            value = value.reshape(self.shape)\n", "rules"),
    Fault("weights from a file: two values are not for one variable", "weights/pairing.py",
          "        if other is not taken:\n", "        if False:\n", "rules"),
    Fault("weights from a file: a rule that matches nothing is an error", "weights/rules.py",
          "    if idle:\n", "    if False:\n", "rules"),
    Fault("weights from a file: numbers mean the same on both sides", "weights/taking.py",
          "if by_number and numbers != there[tensor.layer]:", "if False:", "formats"),
    Fault("weights from a file: names of layers are not guessed", "weights/taking.py",
          "        if id(here) in view.vague:\n", "        if False:\n", "formats"),
    Fault("a loss of Keras divides by what masks leave on all replicas", "keras/losses.py",
          "tf.math.divide_no_nan(total, whole * factor)", "tf.math.divide_no_nan(total, count)", "keras_replicas"),
    Fault("gradients that come back through a sum over replicas have the weights of their losses", "compat/patches.py",
          "lambda gradient: gradient * tf.cast(factor, gradient.dtype)", "lambda gradient: gradient", "keras_replicas"),
    Fault("a step on replicas is tried with other weights, too", "keras/means.py", "            trial.move(number)\n", "", "keras_replicas"),
    Fault("a step on replicas is tried as it trains", "keras/losses.py",
          "if not weighs_collectives() or", "if True or", "keras_replicas"),
    Fault("data in Python: a loader continues within its pass", "data/loader.py",
          "        while self._number < number:\n", "        while False:\n", "loaders"),
    Fault("a state of a loader that lies is found", "data/loader.py",
          "            if mark is None or mark.digest != digest:\n", "            if mark is None:\n", "loaders"),
    Fault("the state of a loader is that of the batch that was used", "data/loader.py",
          "if mark.number < consumed and mark.epoch", "if mark.epoch", "loaders"),
    Fault("data in Python: a batch has its number", "keras/python_data.py",
          "located(positions // self._batch_size)", "located(1 + positions // self._batch_size)", "python_data"),
    Fault("callbacks: each batch has its own logs", "keras/results.py",
          "value[index] for", "value[0] for", "batch_callbacks"),
    Fault("weights from a file: an index names only files beside it", "stores/shards.py",
          "not folders.is_name(name) or not", "not isinstance(name, str) or not", "hostile_weights"),
    Fault("weights from a file: no pickled code", "weights/opening.py",
          'if re.search(rb\'"class_name"\\s*:\\s*"__lambda__"\', text):', "if False:", "hostile_weights"),
    Fault("weights from a file: HDF5 leads nowhere else", "weights/hdf5_contents.py",
          "not isinstance(link := group.get(name, getlink=True), h5py.HardLink)",
          "isinstance(link := group.get(name, getlink=True), bytes)", "hostile_weights"),
    Fault("weights from a file: a layer is taken whole or not at all", "weights/pairing.py",
          " in torn | other:", " in other:", "whole_layers"),
    Fault("another number of workers has the position of a loader, or is refused", "checkpoint/checkpointer.py",
          "workers.count) and not is_position(found):", "workers.count):", "loader_parts"),
    Fault("a slow loader is named", "data/causes.py",
          "loader.seconds * 1e9 if loader else 0.0", "0.0", "bottleneck"),
    Fault("data in Python: a loader that is longer than its length is said", "data/loader.py",
          "if ended := self._index == self.length:", "if ended := False:", "python_data"),
    Fault("an export writes into no folder of the run", "exports/new_folder.py",
          "if parts[0] in {*written, os.curdir} and", "if False and", "exports/export_formats"),
    Fault("an estimate counts the saves before evaluations", "binary/estimate.py",
          "found = sorted({*by_steps, *self.evaluations, self.end})", "found = sorted({*by_steps, self.end})", "estimate"),
    Fault("an estimate leaves the run directory as it is", "binary/trial.py",
          'changed = {"model_dir": folder,', 'changed = {"model_dir": values["model_dir"],', "estimate"),
    Fault("run.json has the goodput of all starts", "report/run_report.py",
          "as_goodput(starts)", "as_goodput([start])", "goodput"),
    Fault("steps that a rollback took back are not goodput", "run/goodput.py", "        step = to\n", "        step = end\n",
          "goodput"),
    Fault("a slow worker is named by its own steps", "actions/stragglers.py",
          "parts.append(now() - at)", "parts.append(0 * (now() - at))", "stragglers"),
    Fault("a worker is slow only if the others wait for it", "actions/stragglers.py", "more >= _SHARE * total",
          "more >= 0", "comparing"),
    Fault("rows of one form are traced once", "keras/new_rows.py", "self._traced.setdefault(", "{}.setdefault(", "new_rows"),
    Fault("a prediction does not use a trace whose values have changed", "keras/new_rows.py",
          "            self._traced, self._values = {}, None\n", "            pass\n", "new_rows"),
    Fault("an evaluator of new rows alone evaluates nothing", "loop/task_loop.py", "and evaluation.task.predicts_only:",
          "and False:", "new_rows"),
    Fault("a launch removes what a killed one has left", "processes/child.py",
          "                _remove(os.path.join(top, name))\n", "                pass\n", "child"),
    Fault("a child ends with its parent", "processes/child.py",
          "        _LIBC.prctl(1, int(number))  # PR_SET_PDEATHSIG\n", "        pass\n", "child"),
    Fault("a child ends with its parent where the kernel does not end it", "processes/child.py",
          'read -r line || kill', 'read -r line && kill', "child"),
    Fault("an order of others is not followed", "base/orders.py", "& 0o077:", "& 0:", "child"),
    Fault("Ctrl-C prints no traceback of workers that import", "processes/group.py",
          "    return signal.SIGTERM if number == signal.SIGINT else number", "    return number", "local_workers"),
    Fault("a batch of a data worker is the one that is due", "data/service.py",
          "tf.debugging.Assert(number == due, [text])", "tf.debugging.Assert(number >= 0, [text])", "service"),
    Fault("each data worker makes a part of the batches", "data/context.py",
          "self.replicas_per_pipeline + number", "self.replicas_per_pipeline", "service"),
    Fault("a training that waits for a dead data worker ends", "guards/watchdog.py",
          "and (lost := self._lost()):", "and (lost := ''):", "service"),
]  # fmt: skip


def plant(fault, copy):
    """Plants a fault in a copy of the project."""
    path = copy / "looplib" / fault.path
    text = path.read_text()
    assert text.count(fault.right) == 1, f"{fault.path} has {fault.right!r} {text.count(fault.right)} times"
    path.write_text(text.replace(fault.right, fault.wrong))


def failed(copy, tests):
    """Runs test files, until one test fails, or does not end; returns its name, or None."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not alone", *tests]
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            output, _ = run.communicate(timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return f"no end within {_MOST_SECONDS} s"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if found or run.returncode in (0, 5):  # 5: all tests of the file are slow
        return found and found[1]
    return output.strip().splitlines()[-1] if output.strip() else f"pytest ended with {run.returncode}"


def main():
    """Plants the faults that are named, or all, and prints which test catches each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression for promises")
    parser.add_argument("--all_tests", action="store_true", help="run all of `make test` where the named tests pass")
    options = parser.parse_args()
    left = []
    for fault in FAULTS:
        if not re.search(options.only, fault.promise):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "looplib"
            names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            for name in names.splitlines():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            subprocess.run([sys.executable, "-c", "from setuptools import setup; setup()", "-q", "egg_info"], cwd=copy)
            plant(fault, copy)
            start = time.monotonic()
            caught = None
            for name in fault.tests.split():
                (path,) = (copy / "tests").rglob(f"{name.rpartition('/')[2]}_test.py")
                caught = caught or failed(copy, [str(path)])
            for name in fault.tests.split() if caught is None else ():
                (path,) = (copy / "tests").rglob(f"{name.rpartition('/')[2]}_test.py")
                if caught is None and (found := failed(copy, ["--all", str(path)])):
                    caught = f"{found}, by `make test-all`"
            if caught is None and options.all_tests:
                caught = failed(copy, ["tests", "-n", "2", "--dist", "loadfile"])
            if caught is None:
                left.append(fault.promise)
            print(
                f"{fault.promise} ({fault.path}): {caught or 'NOT CAUGHT'} ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
    return f"not caught: {', '.join(left)}" if left else None


if __name__ == "__main__":
    sys.exit(main())

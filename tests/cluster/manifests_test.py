"""The files of docs/cluster for Kubernetes: what their tools take, what their pods are told, and which end restarts what.

Two tests need what is not installed with looplib: `pip install kubeflow-trainer-api`, and a folder with the custom resource
definitions of JobSet (config/components/crd/bases) and Kubeflow Trainer (manifests/base/crds), which LOOPLIB_CRDS names. They
were last run with JobSet 0.12.0 and Trainer 2.3.0.
"""

import json
import os
import pathlib
import re

import pytest
import yaml

from looplib.cluster.environment import resolve

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "cluster"
CRDS = os.environ.get("LOOPLIB_CRDS")


def documents(name):
    return list(yaml.safe_load_all((DOCS / f"{name}.yaml").read_text()))


INDEXED = documents("kubernetes_indexed_job")
(JOBSET,), (RUNTIME,), (TRAINJOB,) = map(documents, ("kubernetes_jobset", "kubeflow_runtime", "kubeflow_trainjob"))
NAMESPACED = {**RUNTIME, "kind": "TrainingRuntime"}  # as the comment of the file has it


# What the tools take.


def schema_of(document):
    """The schema of a custom resource as JSON Schema, in which unknown fields are wrong, as for `kubectl apply`."""
    group, _, version = document["apiVersion"].partition("/")
    (path,) = pathlib.Path(CRDS).glob(f"{group}_{document['kind'].lower()}s.yaml")
    crd = yaml.load(path.read_text(), yaml.CSafeLoader)
    (found,) = (one for one in crd["spec"]["versions"] if one["name"] == version)
    return strict(found["schema"]["openAPIV3Schema"])


def strict(schema):
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    changed = {key: value if key in ("enum", "default") else strict(value) for key, value in schema.items()}
    if "properties" in changed and not changed.get("x-kubernetes-preserve-unknown-fields"):
        changed["additionalProperties"] = False
    return changed


@pytest.mark.skipif(not CRDS, reason="needs the custom resource definitions: see the top of this file")
@pytest.mark.parametrize("document", [JOBSET, RUNTIME, NAMESPACED, TRAINJOB], ids=lambda document: document["kind"])
def test_a_manifest_is_what_its_custom_resource_definition_takes(document):
    jsonschema = pytest.importorskip("jsonschema")
    schema = schema_of(document)
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(document)] == []
    for wrong in ({"metadata": "train"}, {"spec": {**document["spec"], "unknown": 1}}):
        assert list(validator.iter_errors({**document, **wrong}))


@pytest.mark.parametrize("document", [*INDEXED, JOBSET, RUNTIME, NAMESPACED, TRAINJOB], ids=lambda document: document["kind"])  # fmt: skip
def test_a_manifest_is_what_the_models_of_the_api_take(document):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    prefix = {"v1": "IoK8sApiCoreV1", "batch/v1": "IoK8sApiBatchV1", "jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2",
              "trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1"}[document["apiVersion"]]  # fmt: skip
    model = getattr(models, prefix + ("JobSet" if document["kind"] == "JobSet" else document["kind"]), None)
    if model is None:
        pytest.skip(f"the package has no model of a {document['kind']}")
    assert without_defaults(json.loads(model.from_dict(document).to_json())) == document  # unknown fields get lost


def without_defaults(value):
    if isinstance(value, dict):
        return {key: without_defaults(one) for key, one in value.items() if (key, one) != ("protocol", "TCP")}
    return [without_defaults(one) for one in value] if isinstance(value, list) else value


# What the pods are told.


def pod_environ(variables, metadata, index):
    """Returns what Kubernetes would give a pod (a stand-in: there is no cluster here), from the manifest."""
    environ = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in variables:
        if "value" in variable:
            environ[variable["name"]] = variable["value"]
        else:
            kind, _, key = variable["valueFrom"]["fieldRef"]["fieldPath"].removeprefix("metadata.").partition("['")
            environ[variable["name"]] = metadata[kind][key.removesuffix("']")]
    return environ


def annotations(name, job, job_index, replicas, attempt):
    """Those that JobSet gives a pod."""
    marks = {"jobset-name": name, "replicatedjob-name": job, "job-index": str(job_index),
             "replicatedjob-replicas": str(replicas), "restart-attempt": str(attempt)}  # fmt: skip
    return {"annotations": {f"jobset.sigs.k8s.io/{key}": value for key, value in marks.items()}}


def test_the_indexed_jobs_manifest_gives_each_pod_its_place():
    service, job = INDEXED
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    count = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == count
    metadata = {"labels": {"batch.kubernetes.io/job-name": name}}
    port = container["ports"][0]["containerPort"]
    addresses = tuple(f"{name}-{i}.{pod['subdomain']}:{port}" for i in range(count))  # as Kubernetes names pods
    for i in range(count):
        cluster = resolve(pod_environ(container["env"], metadata, i))
        assert (cluster.workers, cluster.index, cluster.source) == (addresses, i, "the Indexed Job")


def test_the_jobsets_manifest_gives_each_pod_its_place():
    name, (jobs,) = JOBSET["metadata"]["name"], JOBSET["spec"]["replicatedJobs"]
    assert JOBSET["spec"]["network"]["enableDNSHostnames"]
    job = jobs["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    port, count = container["ports"][0]["containerPort"], job["completions"]
    places = [(i, j) for i in range(jobs["replicas"]) for j in range(count)]
    addresses = tuple(f"{name}-{jobs['name']}-{i}-{j}.{name}:{port}" for i, j in places)  # as JobSet names pods
    for index, (i, j) in enumerate(places):
        metadata = annotations(name, jobs["name"], i, jobs["replicas"], 2)
        cluster = resolve(pod_environ(container["env"], metadata, j))
        assert (cluster.workers, cluster.index, cluster.job_id) == (addresses, index, "2")
        assert cluster.source == "the JobSet"


def test_the_runtime_and_a_trainjob_give_each_pod_its_place():
    """As Trainer does: a JobSet of the TrainJob's name, with as many pods as it has nodes, and its variables added."""
    template = RUNTIME["spec"]["template"]["spec"]
    (job,) = template["replicatedJobs"]
    assert template["network"]["enableDNSHostnames"] and job["replicas"] == 1 and job["name"] == "node"
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node" and TRAINJOB["spec"]["runtimeRef"] == {"name": RUNTIME["metadata"]["name"]}
    trainer, name = TRAINJOB["spec"]["trainer"], TRAINJOB["metadata"]["name"]
    added = {variable["name"] for variable in trainer["env"]}
    variables = [*(one for one in container["env"] if one["name"] not in added), *trainer["env"]]
    addresses = tuple(f"{name}-node-0-{i}.{name}:2222" for i in range(trainer["numNodes"]))  # its PodSets.Endpoints
    for i in range(trainer["numNodes"]):
        cluster = resolve(pod_environ(variables, annotations(name, "node", 0, 1, 3), i))
        assert (cluster.workers, cluster.index, cluster.job_id) == (addresses, i, "3")


# Which end restarts what.


def action(spec, code=0, condition=""):
    """Returns what JobSet does when a container ends with a code, or a pod has a condition; None for a counted restart.

    The messages are those of Kubernetes' pod failure policy, and the first rule of JobSet decides that one fits.
    """
    job = spec["replicatedJobs"][0]["template"]["spec"]
    for number, rule in enumerate(job["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        if code and code in rule.get("onExitCodes", {}).get("values", ()):
            how = f"Container train for pod default/train-workers-0-1-x2b75 failed with exit code {code}"
        elif condition in [one["type"] for one in rule.get("onPodConditions", ())]:
            how = f"Pod default/train-workers-0-1-x2b75 has condition {condition}"
        else:
            continue
        message = f"{how} matching FailJob rule at index {number}"
        reason = "PodFailurePolicy"
        break
    else:
        reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return None


@pytest.mark.parametrize("spec", [JOBSET["spec"], RUNTIME["spec"]["template"]["spec"]], ids=["JobSet", "Trainer"])
def test_a_saved_run_restarts_without_being_counted_and_a_wrong_command_not_at_all(spec):
    assert action(spec, 75) == action(spec, condition="DisruptionTarget") == "RestartJobSetAndIgnoreMaxRestarts"
    assert {action(spec, code) for code in (2, 126, 127)} == {"FailJobSet"}
    assert {action(spec, code) for code in (1, 76, 134, 137, 139)} == {None} and spec["failurePolicy"][
        "maxRestarts"
    ] > 0
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert (
        pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    )  # a pod failure policy needs it

"""Callbacks, and a loss with the accuracy of each class; the folder of this file must be on
PYTHONPATH.

PYTHONPATH=examples jaxdp train --config configs/digits.yaml --loss.target callbacks.PerClass \
  --callbacks '[callbacks.WorstClasses]' --run_dir runs/per_class
PYTHONPATH=examples jaxdp train --config configs/python_gpt.yaml --callbacks \
  '[{target: callbacks.TextSamples, args: {prompt: "def "}}]' --run_dir runs/samples
"""

import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp.checkpoint.weights import from_checkpoint, on_host
from jaxdp.cli.option_table import VERBS
from jaxdp.cli.sample import sample
from jaxdp.losses import SoftmaxCrossEntropy, compute_logits


class PerClass(SoftmaxCrossEntropy):
    """Cross-entropy with a metric `accuracy/3` for each class: a pair of the hits and the examples
    of the class.
    """

    reads_logits = False

    def __call__(self, outputs, batch):
        loss, weight, metrics = super().__call__(outputs, batch)
        logits, labels = compute_logits(outputs), batch["labels"]
        hits = jnp.argmax(logits, -1) == labels
        for i in range(logits.shape[-1]):
            ones = batch["mask"] * (labels == i)
            metrics[f"accuracy/{i}"] = jnp.sum(hits * ones), jnp.sum(ones)
        return loss, weight, metrics


class WorstClasses:
    """Print the classes with the lowest accuracy after each evaluation."""

    def __init__(self, count: int = 3):
        self.count = count

    def evaluated(self, step, record):
        classes = sorted(
            (value, name) for name, value in record.items() if name.startswith("accuracy/")
        )
        if jaxdp.current().is_root:
            print(
                f"step {step}: "
                + ", ".join(f"{name} {value:.3f}" for value, name in classes[: self.count])
            )


class Histograms:
    """Record histograms of the parameters in the last checkpoint, after each evaluation, for the
    report.
    """

    def __init__(self, bins: int = 32):
        self.bins, self.last = bins, None

    def start(self, run, progress):
        self.run = run

    def evaluated(self, step, record):
        checkpoints = self.run.checkpoints
        if checkpoints.wait() is not None or not checkpoints.steps() or not jaxdp.current().is_root:
            return
        if (last := checkpoints.steps()[-1]) == self.last:
            return
        self.last = last
        for name, array in on_host(
            from_checkpoint(checkpoints.directory / str(last), ema=False)
        ).items():
            values = np.asarray(array, np.float32)
            if (values := values[np.isfinite(values)]).size:
                counts, edges = np.histogram(values, self.bins)
                facts = {
                    "low": float(edges[0]),
                    "high": float(edges[-1]),
                    "counts": counts.tolist(),
                }
                self.run.log.events.note("histogram", last, name=name, **facts)


class Pictures:
    """Write the first inputs of the training data as one picture after each evaluation; needs
    Pillow.
    """

    def __init__(self, count: int = 8):
        self.count = count

    def start(self, run, progress):
        self.run = run

    def evaluated(self, step, record):
        import PIL.Image

        if jaxdp.current().is_root:  # one rank writes
            pixels = self.run.data.train.dataset.read(np.arange(self.count))["inputs"][
                ..., 0
            ].astype(float)
            row = np.hstack(255 * pixels / pixels.max()).astype(np.uint8)
            media = self.run.log.directory / "media"
            media.mkdir(exist_ok=True)
            PIL.Image.fromarray(row).save(media / f"{step}-inputs.png")


class TextSamples:
    """Print text from the last checkpoint after each evaluation, as `jaxdp sample` does, and show
    it in the report.
    """

    def __init__(self, prompt: str = "\n", tokens: int = 64):
        defaults = {name: option.default for name, option in VERBS["sample"].options.items()}
        self.options = {**defaults, "prompt": prompt, "tokens": tokens}

    def start(self, run, progress):
        self.run = run

    def evaluated(self, step, record):
        if (
            self.run.checkpoints.wait() is None
            and self.run.checkpoints.steps()
            and jaxdp.current().is_root
        ):
            last = self.run.checkpoints.steps()[-1]
            text = sample({**self.options, "run_dir": self.run.log.directory, "step": last})
            print(f"step {last}: {text!r}")
            # Where the report looks for STEP-NAME.txt and STEP-NAME.png.
            media = self.run.log.directory / "media"
            media.mkdir(exist_ok=True)
            (media / f"{last}-sample.txt").write_text(text, encoding="utf-8")

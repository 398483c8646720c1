"""Search with Optuna (pip install optuna): unpromising runs end at an evaluation. `jaxdp sweep`
needs no library.

python examples/optuna_search.py
"""

import optuna

import jaxdp


class Prune:
    """Report the accuracy of each evaluation to Optuna, and end a run that it considers
    unpromising.
    """

    def __init__(self, trial):
        self.trial = trial

    def evaluated(self, step, record):
        self.trial.report(record["accuracy"], step)
        if self.trial.should_prune():
            raise jaxdp.StopTraining("pruned by Optuna")


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    model = {"target": "MLP", "args": {"hidden": [trial.suggest_int("width", 16, 256, log=True)]}}
    fitted = jaxdp.fit(
        model, {"target": "Digits"}, optimizer={"target": "adamw", "lr": lr}, steps=100, batch_size=64,
        eval={"every": 25}, log={"every": 50}, callbacks=[Prune(trial)],
    )  # fmt: skip
    if "stopped" in fitted.final:
        raise optuna.TrialPruned
    return fitted.final["accuracy"]


study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=8)
print(study.best_params, study.best_value)

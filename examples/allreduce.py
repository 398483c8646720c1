"""All-reduce ones * (rank + 1) over all processes, or within groups of ranks.

    mpirun -np 4 python examples/allreduce.py        srun -n 4 ..., torchrun ..., or python alone work as well

With four processes it prints the table in RAF's documentation of `allreduce` and its `rank_list`:

    rank                            0    1    2    3
    before                          1    2    3    4
    allreduce(x)                   10   10   10   10
    groups=[[0, 1], [2, 3]]         3    3    7    7
    groups=[[0, 1, 2], [3]]         6    6    6    4
    groups=[[0, 1, 2]]              6    6    6    4
"""

import numpy as np

import jaxdp


def main() -> None:
    context = jaxdp.init()
    x = np.ones((1, 4), np.float32) * (context.rank + 1)
    rows = {"before": x, "allreduce(x)": jaxdp.allreduce(x)}
    for groups in ([[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 1, 2]]):
        if context.size == 4:
            rows[f"groups={groups}"] = jaxdp.allreduce(x, groups=groups)
    # Gather the values of all ranks on the root, which prints them: one gather for the full table.
    columns = jaxdp.gather([np.asarray(y)[:, :1] for y in rows.values()], root=context.root_rank)
    if context.is_root:
        print(f"{'rank':28}" + "".join(f"{r:5d}" for r in range(context.size)))
        for name, column in zip(rows, columns, strict=True):
            print(f"{name:28}" + "".join(f"{v:5.0f}" for v in np.asarray(column)[:, 0]))


if __name__ == "__main__":
    main()

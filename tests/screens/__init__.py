"""The screens in the documentation, made anew by the real system: `make screens` (docs/local-cluster.md).

`play` runs the main job on the local cluster and writes down what a person would see: what commands print, the plot of the bench,
and what Prometheus answers to the panels of the chart's dashboard. `terminal` and `board` draw that; `browser` makes a picture of the board.
"""

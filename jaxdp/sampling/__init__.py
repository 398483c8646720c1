"""Samplings: data sets whose examples are drawn in other proportions than they are stored."""

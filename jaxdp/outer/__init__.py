"""Local updates (DiLoCo): replicas that train alone, and an outer optimizer of what they share."""

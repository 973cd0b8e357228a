"""A package, so that the browser and the cluster of its fixtures end with its last test and not with the whole run."""

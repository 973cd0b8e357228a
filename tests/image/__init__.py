"""`make image`: the image of deploy/docker, really built and run (docs/operating/deployment.md)."""

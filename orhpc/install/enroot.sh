#!/bin/sh
# An enroot image of the Docker image, for pyxis.
#   docker build -t orhpc .  (see Dockerfile), then:  sh "$(orhpc files enroot.sh)" orhpc.sqsh
# In a config:  slurm: {container: {kind: pyxis, image: /path/orhpc.sqsh}}
set -eu
exec enroot import --output "${1:-orhpc.sqsh}" dockerd://orhpc:latest

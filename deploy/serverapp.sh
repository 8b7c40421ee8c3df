#!/usr/bin/env bash
# Runs server apps: waits at the SuperLink for runs. It holds test data and run folders. Started
# again whenever it ends; a run that it was working on goes on with resume=true.
#   KEYS            folder made by `fedfrozen keys` (ca.crt, server/superexec.secret)   keys
#   SUPERLINK       host:port of the SuperLink                              127.0.0.1:8000
#   FEDFROZEN_HOME  run folders go to runs/ in it                             ~/.fedfrozen
#   HEALTH          host:port to answer gRPC health checks on; empty = none
set -euo pipefail
keys=${KEYS:-keys}
. "$(dirname "$(readlink -f "$0")")/keep.bash"

while [ -z "$stopped" ]; do
  run flower-superexec \
    --root-certificates "$keys/ca.crt" \
    --superexec-auth-secret-file "$keys/server/superexec.secret" \
    --runtime-api-address "${SUPERLINK:-127.0.0.1:8000}" \
    ${HEALTH:+--health-server-address "$HEALTH"}
  if [ -z "$stopped" ]; then pause "server app's process ended with code $code" "${RESTART_SECONDS:-5}"; fi
done

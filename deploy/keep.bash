# shellcheck shell=bash
# To be sourced: run a command as this script's child, start it again, end with it on SIGTERM.
child='' stopped='' code=0

stop() {
  stopped=yes
  if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; fi
}
trap stop TERM INT HUP

run() { # a command that is asked to end when this script is; its exit code is left in `code`
  "$@" & child=$!
  if [ -n "$stopped" ]; then stop; fi
  code=0
  # a trap interrupts `wait`, so wait until the command has really ended
  while wait "$child" || code=$?; kill -0 "$child" 2>/dev/null; do code=0; done
  child=''
}

pause() { # pause REASON SECONDS
  echo "$1; starting again in $2 s"
  run sleep "$2"
}

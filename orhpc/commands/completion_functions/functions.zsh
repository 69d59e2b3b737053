# Run directories, and folders on the way to them.
_orhpc_runs() {
  local -a runs folders
  local folder
  [[ -n $PREFIX ]] || runs+=( runs/*/config.yaml(N:h) runs/*/*/config.yaml(N:h) )
  for folder in ${(Q)PREFIX}*(N-/); do
    if [[ -f $folder/config.yaml || -f $folder/config.json ]]; then runs+=( $folder ); else folders+=( $folder/ ); fi
  done
  compadd -f -- $runs
  compadd -f -S '' -- $folders
}

# Config files, settings, and the values of a setting.
_orhpc_settings() {
  local -a all keys
  all=( @VALUES@ )
  keys=( @KEYS@ )
  if [[ $PREFIX == *=* ]]; then
    local key=${PREFIX%%=*}
    compset -P '*='
    compadd -- ${${(M)all:#$key=*}#*=}
    return
  fi
  compadd -- @CONFIGS@
  compadd -S '' -- $keys
  _files -g '*.(yaml|yml)(-.)'
}

_orhpc_packaged() { compadd -- @PACKAGED@ }
# --- after shtab's script

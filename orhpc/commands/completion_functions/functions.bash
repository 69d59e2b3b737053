# Run directories, and folders on the way to them.
_orhpc_runs() {
  local word=$1 folder config
  if [[ -z $word ]]; then
    for config in runs/*/config.yaml runs/*/*/config.yaml; do
      [[ ! -f $config ]] || echo "${config%/config.yaml}"
    done
  fi
  for folder in "$word"*/; do
    [[ -d $folder ]] || continue
    folder=${folder%/}
    if [[ -f $folder/config.yaml || -f $folder/config.json ]]; then echo "$folder"; else echo "$folder/"; fi
  done
}

# Config files and settings.  bash takes '=' for the end of a word: of key=value, only the value is completed.
_orhpc_settings() {
  local word=$1 key= path
  if [[ $word == = ]]; then
    key=${COMP_WORDS[COMP_CWORD - 1]} word=
  elif [[ ${COMP_WORDS[COMP_CWORD - 1]} == = ]]; then
    key=${COMP_WORDS[COMP_CWORD - 2]}
  elif [[ $word == *=* ]]; then
    compgen -W "@VALUES@" -- "$word"
    return
  fi
  if [[ -n $key ]]; then
    local values=
    for path in @VALUES@; do [[ $path != "$key="* ]] || values+=" ${path#*=}"; done
    compgen -W "$values" -- "$word"
    return
  fi
  for path in "$word"*; do
    if [[ -d $path ]]; then echo "$path/"; elif [[ $path == *.y?(a)ml && -f $path ]]; then echo "$path"; fi
  done
  compgen -W "@CONFIGS@ @KEYS@" -- "$word"
}

_orhpc_packaged() { compgen -W "@PACKAGED@" -- "$1"; }
# --- after shtab's script
# No blank after a folder, or after the '=' of a setting.
_orhpc_complete() {
  local one
  _shtab_orhpc "$@"
  for one in "${COMPREPLY[@]}"; do [[ $one == *[=/] ]] || return 0; done
  [[ ${#COMPREPLY[@]} == 0 ]] || compopt -o nospace
}
complete -o bashdefault -o default -F _orhpc_complete orhpc

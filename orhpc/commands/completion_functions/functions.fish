# Run directories, and folders on the way to them.
function _orhpc_runs
    set -l word (commandline -ct)
    if test -z "$word"
        for config in runs/*/config.yaml runs/*/*/config.yaml
            string replace -r '/config.yaml$' '' -- $config
        end
    end
    for folder in (__fish_complete_directories $word '')
        set -l path (string trim -r -c / -- (string split -m1 \t -- $folder)[1])
        if test -f $path/config.yaml -o -f $path/config.json
            echo $path
        else
            echo $path/
        end
    end
end

# Config files, settings, and the values of a setting.
function _orhpc_settings
    set -l word (commandline -ct)
    set -l values @VALUES@
    if string match -q '*=*' -- $word
        printf '%s\n' $values
        return
    end
    printf '%s\n' @CONFIGS@ @KEYS@
    __fish_complete_suffix .yaml
end

function _orhpc_packaged
    printf '%s\n' @PACKAGED@
end
# --- after shtab's script

# The checks of tools/check and tools/test: sourced by both, with .venv/bin first in PATH.

outputs=$(mktemp -d "${TMPDIR:-/tmp}/fusecache-checks.XXXXXX")
names=()
processes=()
failed=()
leave() {
    local running
    mapfile -t running < <(jobs -p)
    ((${#running[@]} == 0)) || kill "${running[@]}" 2>/dev/null
    rm -rf "$outputs"
}
trap leave EXIT

check() { # name, command…: begins it; `report` says how it ended
    local name=$1
    shift
    "$@" >"$outputs/${#names[@]}" 2>&1 &
    processes+=($!)
    names+=("$name")
}
report() { # waits for each check, in order; the output of one is shown only if it fails
    local number
    for number in "${!names[@]}"; do
        if wait "${processes[number]}"; then
            echo "${names[number]}: ok"
        else
            cat "$outputs/$number"
            echo "${names[number]}: FAILED"
            failed+=("${names[number]}")
        fi
    done
}
verdict() { # of the script $1: the last line, and the exit code
    if ((${#failed[@]})); then
        (IFS=,; echo "$1: FAILED: ${failed[*]}")
        exit 1
    fi
    echo "$1: all passed"
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy --strict" mypy
check "import-linter" lint-imports
check "clang-format" clang-format --dry-run -Werror fusecache/native/*/*.[ch] hintsd/native/*.c
include=(-I/usr/include/fuse3 "-I$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')")
check "gcc -Wall -Wextra -Werror" gcc -fsyntax-only -Wall -Wextra -Werror "${include[@]}" fusecache/native/*/*.c hintsd/native/*.c
check "vermin (client: Python 3.9)" vermin -q --no-tips -t=3.9- client

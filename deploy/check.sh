#!/usr/bin/env bash
# Checks everything in deploy/ that needs no container: each compose file with each profile, Prometheus' config, alert rules and their
# tests, dashboard queries, and that every metric which rules and dashboard name is one that the code registers. About 10 s.
# Needs docker-compose or `docker compose`, and promtool (Debian's package prometheus is unpacked, not installed, if there is none).
set -uo pipefail
cd "$(dirname "$0")" || exit

passed=0 failed=0
check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED: %s\n%s\n' "$name" "$output"
    fi
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compose() { if docker compose version >/dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi; }

find_promtool() {
    promtool=$(command -v promtool) && return
    (cd "$work" && apt-get download -qq prometheus >/dev/null 2>&1 && dpkg -x prometheus_*.deb root) \
        || { echo 'promtool is missing, and so is Debian'"'"'s package prometheus (apt-get update?)' >&2; exit 1; }
    promtool=$work/root/usr/bin/promtool
}

compose_files() {
    local override
    for override in '' gpu-1.yaml gpu-2.yaml gpu-4.yaml gpu-8-two-prefills.yaml; do
        check "compose.yaml $override" compose -f compose.yaml ${override:+-f "$override"} \
            --profile cpu --profile spare --profile gpu --profile two-prefills --profile observability config
    done
}

# Docker waits a minute longer than every service that drains, whatever DAMASK_DRAIN_GRACE_S is. docker-compose prints durations as they were
# written, `docker compose` in its own way.
stop_follows_drain() {
    local grace
    for grace in 7 20 90; do
        DAMASK_DRAIN_GRACE_S=$grace compose -f compose.yaml --profile cpu --profile spare --profile gpu --profile two-prefills config \
            | python3 -c '
import re, sys
units = {"h": 3600, "m": 60, "s": 1, "ms": 0.001}
seconds = lambda text: sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|[hms])", text))
found = []
for service in re.split(r"(?m)^  (?=[a-z])", sys.stdin.read()):
    grace = re.search(r"DAMASK_DRAIN_GRACE_S: \W?(\d+)", service)
    if grace:
        found.append((float(grace[1]), seconds(re.search(r"stop_grace_period: (\S+)", service)[1])))
assert found == [(float(sys.argv[1]), float(sys.argv[1]) + 60)] * 9, found
' "$grace" || return
    done
}

# Every variable of compose.yaml stands in .env.example with the same default, so that the file really shows every setting.
env_example() {
    diff <(grep -o '\${[A-Z_0-9]*:-[^}]*}' compose.yaml | sed 's/^\${//; s/}$//; s/:-/=/' | grep -v '^PREFILL_1_GPUS=' | sort -u) \
        <(grep -v '^COMPOSE_PROFILES=' .env.example | grep '^[A-Z]' | sort -u)
}

# Dashboard queries, as recording rules, so that promtool parses them.
dashboard_rules() {
    python3 - ../helm/damask/files/dashboard.json <<'PY'
import json, sys
panels = json.load(open(sys.argv[1]))["panels"]
queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
rules = [{"record": f"query:{i}", "expr": q.replace("$__rate_interval", "1m")} for i, q in enumerate(queries)]
print(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
PY
}

# Names that rules and dashboard use, less what Prometheus appends, must be registered somewhere in the code.
metrics_exist() {
    local name unknown=0
    for name in $(grep -ohE 'damask_[a-z_]+' ../helm/damask/files/dashboard.json ../helm/damask/files/alerts.yaml | sort -u); do
        name=${name#damask_} name=${name%_bucket} name=${name%_sum} name=${name%_count} name=${name%_total}
        grep -rqE "\"$name\"" --include=*.rs ../services ../shared || { echo "no code registers damask_$name"; unknown=1; }
    done
    return $unknown
}

find_promtool
compose_files
check 'stop_grace_period' stop_follows_drain
check '.env.example' env_example
mkdir -p "$work/prometheus"
cp observability/prometheus.yaml ../helm/damask/files/alerts.yaml "$work/prometheus"
check 'prometheus.yaml' "$promtool" check config "$work/prometheus/prometheus.yaml"
check 'alert rules' "$promtool" check rules ../helm/damask/files/alerts.yaml
check 'alert tests' "$promtool" test rules observability/alerts.test.yaml
dashboard_rules >"$work/dashboard-rules.yaml"
check 'dashboard queries' "$promtool" check rules "$work/dashboard-rules.yaml"
check 'metric names' metrics_exist

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]

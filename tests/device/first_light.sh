#!/usr/bin/env bash
# All that is to be known of triax on a new device, within six minutes: tests, speed beside others, a trace.
#
#   bash tests/device/first_light.sh                                  # on one GPU; results in runs/first-light
#   OUT=results WHEELS=wheels PYTHON=python3 bash tests/device/first_light.sh
#   DEVICE=cpu bash tests/device/first_light.sh                       # a rehearsal, with small sizes
#
# WHEELS: a folder of packages to install first, without a network. Each part has a time limit, and writes its own log;
# summary.txt says after each part how it ended, so that a run that is stopped leaves what it has.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=$(mkdir -p "${OUT:-runs/first-light}" && cd "${OUT:-runs/first-light}" && pwd)
DEVICE=${DEVICE:-cuda} PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-350}
BEGUN=$SECONDS SUMMARY=$OUT/summary.txt WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
: >"$SUMMARY"
ln -s "$PWD" "$WORK/triax" # the checkout is the package, whatever its folder is called
export PYTHONPATH=$WORK${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

part() { # part NAME SECONDS COMMAND...: run a command, for so long at most, into NAME.log
	local name=$1 seconds=$2 left=$((LIMIT - (SECONDS - BEGUN))) begun=$SECONDS code
	shift 2
	((seconds = left < seconds ? left : seconds))
	if ((seconds < 5)); then
		echo "$name: not run, no time left" | tee -a "$SUMMARY"
		return
	fi
	timeout -k 5 "$seconds" "$@" >"$OUT/$name.log" 2>&1
	code=$?
	case $code in
	0) code="done" ;;
	124 | 137) code="stopped after $seconds s" ;;
	*) code="failed with code $code" ;;
	esac
	echo "$name: $code, $((SECONDS - begun)) s: $(tail -n 1 "$OUT/$name.log" | cut -c1-150)" | tee -a "$SUMMARY"
}

if [[ $DEVICE == cpu ]]; then
	speed=(--device cpu --size smoke --rounds 1 --steps 1) host=(--device cpu --overhead --rounds 1 --steps 2)
	model=bytes-tiny length=32
else
	speed=(--size 1.3b --rounds 3 --steps 3) host=(--overhead --rounds 3)
	model=gpt2-medium length=1024
fi
if [[ -n ${WHEELS:-} ]]; then
	part install 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$WORK/site" "$WHEELS"/*.whl
	PYTHONPATH=$WORK/site:$PYTHONPATH
fi
part environment 30 bash -c "nvidia-smi; '$PYTHON' -m triax.cli.main env"
part tests 130 "$PYTHON" -m pytest -m device tests/device -q -p no:cacheprovider --device "$DEVICE" --maxfail 10
part speed 120 "$PYTHON" benchmarks/device.py "${speed[@]}"
part host 40 "$PYTHON" benchmarks/device.py "${host[@]}"
cat >"$WORK/run.yaml" <<YAML
name: traced
runs: $WORK/runs
model: {preset: $model}
data: {training: $WORK/tokens}
batch: {size: 4, microbatch: 1}
precision: bf16
training: {steps: 4, sequence: $length, learning_rate: 1.0e-4}
monitor: {profiler: 3, trace: 4}
YAML
triax="'$PYTHON' -m triax.cli.main"
part trace 50 bash -c "$triax data tokenize docs --tokenizer bytes --output '$WORK/tokens' && $triax train '$WORK/run.yaml'"
find "$WORK/runs/traced" \( -name "*.trace.json" -o -name timeline.json -o -name metrics.jsonl \) -size -16M -exec cp {} "$OUT" \; 2>>"$SUMMARY"
echo "$((SECONDS - BEGUN)) s in all" | tee -a "$SUMMARY"

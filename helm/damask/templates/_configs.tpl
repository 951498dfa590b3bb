{{/* The services' YAML files: what the chart knows, and `config` from the values over it. */}}

{{- define "damask.gatewayConfig" -}}
{{- $config := dict
  "listen" "0.0.0.0:8000"
  "grpc_listen" "0.0.0.0:8001"
  "admin_listen" "0.0.0.0:8002"
  "router" (printf "%s-router.%s.svc.%s:9000" (include "damask.fullname" .) .Release.Namespace .Values.clusterDomain)
  "model" .Values.model.source -}}
{{- mustMergeOverwrite $config (deepCopy .Values.gateway.config) | toYaml -}}
{{- end -}}

{{- define "damask.routerConfig" -}}
{{- $host := include "damask.workersHost" . -}}
{{- $workers := dict "prefill" list "decode" list -}}
{{- range include "damask.processes" . | fromJsonArray -}}
{{- $_ := set $workers .role (append (get $workers .role) (printf "%s:%d" $host (int .port))) -}}
{{- end -}}
{{- $config := dict "listen" "0.0.0.0:9000" "admin_listen" "0.0.0.0:9001" "workers" $workers -}}
{{- mustMergeOverwrite $config (deepCopy .Values.router.config) | toYaml -}}
{{- end -}}

{{/* (dict "root" $ "process" one of damask.processes). Name and KV address are the pod's: they come from its environment. On GPUs, what the CUDA
engine needs; workers on one GPU share its memory. */}}
{{- define "damask.workerConfig" -}}
{{- $process := .process -}}
{{- $config := dict
  "name" $process.name
  "listen" (printf "0.0.0.0:%d" (int $process.port))
  "admin_listen" (printf "0.0.0.0:%d" (int $process.admin))
  "model" .root.Values.model.source -}}
{{- if eq .root.Values.workers.accelerator "nvidia" -}}
{{- $_ := set $config "backend" "cuda" -}}
{{- $_ := set $config "numerics" (dict "compute" "bf16" "routing" "bf16" "kv" "bf16") -}}
{{- $_ := set $config "page_tokens" 64 -}}
{{- $onFirst := list -}}
{{- range .root.Values.workers.processes -}}
{{- if has (first $process.gpus) .gpus -}}{{- $onFirst = append $onFirst .name -}}{{- end -}}
{{- end -}}
{{- $isShared := gt (len $onFirst) 1 -}}
{{- if $isShared -}}
{{- $_ := set $config "gpu_memory_share" (divf 0.94 (len $onFirst)) -}}
{{- end -}}
{{- if eq $process.role "prefill" -}}
{{- $_ := set $config "chunk_tokens" (ternary 2048 32768 $isShared) -}}
{{- $_ := set $config "transfer" (dict "in_flight_bytes_max" (ternary 1073741824 1342177280 $isShared)) -}}
{{- else -}}
{{- $_ := set $config "max_sequences" (ternary 32 128 $isShared) -}}
{{- end -}}
{{- end -}}
{{- if eq $process.role "decode" -}}
{{- $_ := set $config "kv_listen" (printf "0.0.0.0:%d" (int $process.kv)) -}}
{{- end -}}
{{- mustMergeOverwrite $config (deepCopy $process.config) | toYaml -}}
{{- end -}}

{{- define "damask.workersConfigData" -}}
{{- range include "damask.processes" . | fromJsonArray }}
{{ .name }}.yaml: |
{{ include "damask.workerConfig" (dict "root" $ "process" .) | indent 2 }}
{{- end }}
{{- if and (eq .Values.workers.accelerator "nvidia") (eq .Values.workers.allocation "devicePlugin") }}
node.yaml: |
  # What `damask node` runs, in the order in which it drains.
  workers:
    {{- range $role := list "prefill" "decode" }}
    {{- range include "damask.processes" $ | fromJsonArray }}
    {{- if eq .role $role }}
    - { role: {{ .role }}, name: {{ .name }}, devices: [{{ include "damask.gpuList" . }}], config: /etc/damask/{{ .name }}.yaml }
    {{- end }}
    {{- end }}
    {{- end }}
{{- end }}
{{- end -}}

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

{{/* (dict "root" $ "process" one of damask.processes). Name and KV address are the pod's: they come from its environment. */}}
{{- define "damask.workerConfig" -}}
{{- $process := .process -}}
{{- $config := dict
  "name" $process.name
  "listen" (printf "0.0.0.0:%d" (int $process.port))
  "admin_listen" (printf "0.0.0.0:%d" (int $process.admin))
  "model" .root.Values.model.source -}}
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
{{- end -}}

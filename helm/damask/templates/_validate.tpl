{{/* What the schema cannot say. Included by NOTES.txt and by the StatefulSet, so that every way of rendering meets it. */}}
{{- define "damask.validate" -}}
{{- $gateway := .Values.gateway -}}
{{- $stateful := or $gateway.persistence.enabled (hasKey $gateway.config "responses_store") -}}
{{- if and $stateful (or (gt (int $gateway.replicas) 1) $gateway.autoscaling.enabled) -}}
{{- fail "gateway.replicas: a gateway with a store (gateway.config.responses_store or gateway.persistence) runs as one replica, without autoscaling: one process owns the store's file" -}}
{{- end -}}
{{- if and (ne .Values.model.source "embedded-nano") (not .Values.model.volume) -}}
{{- fail (printf "model.volume: the model %s must come from a volume" .Values.model.source) -}}
{{- end -}}
{{- $workers := .Values.workers -}}
{{- $oneContainer := and (eq $workers.accelerator "nvidia") (eq $workers.allocation "devicePlugin") -}}
{{- $roles := dict -}}
{{- $names := dict -}}
{{- range $workers.processes -}}
{{- $_ := set $roles .role true -}}
{{- if hasKey $names .name -}}
{{- fail (printf "workers.processes: two are called %s" .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- if and $oneContainer (eq .name "node") -}}
{{- fail "workers.processes: none may be called node, the name of the file that lists them" -}}
{{- end -}}
{{- if eq $workers.accelerator "nvidia" -}}
{{- $layout := default dict .config.layout -}}
{{- $ranks := mul (default 1 $layout.tp) (default 1 $layout.dp) -}}
{{- if not $layout.tp -}}
{{- fail (printf "workers.processes %s: config.layout.tp is needed with GPUs" .name) -}}
{{- end -}}
{{- if ne (int $ranks) (len .gpus) -}}
{{- fail (printf "workers.processes %s: tp x dp is %d, but it has %d gpus" .name (int $ranks) (len .gpus)) -}}
{{- end -}}
{{- range .gpus -}}
{{- if ge (int .) (int $workers.gpusPerPod) -}}
{{- fail (printf "workers.processes: there is no GPU %d among %d" (int .) (int $workers.gpusPerPod)) -}}
{{- end -}}
{{- end -}}
{{- else if .gpus -}}
{{- fail (printf "workers.processes %s: gpus without workers.accelerator=nvidia" .name) -}}
{{- end -}}
{{- end -}}
{{- if ne (len $roles) 2 -}}
{{- fail "workers.processes: at least one prefill and one decode worker are needed" -}}
{{- end -}}
{{- if and (eq $workers.accelerator "nvidia") (eq $workers.allocation "dra") (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail "workers.allocation: dra needs Kubernetes 1.34 (resource.k8s.io/v1)" -}}
{{- end -}}
{{- end -}}

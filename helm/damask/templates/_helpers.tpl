{{/* Names and labels. */}}
{{- define "damask.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of one component: (dict "root" $ "component" "gateway"). */}}
{{- define "damask.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "damask.labels" -}}
{{ include "damask.selector" . }}
app.kubernetes.io/part-of: damask
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "damask.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "damask.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "image" .Values.image) */}}
{{- define "damask.image" -}}
{{- $tag := default .root.Chart.AppVersion .image.tag -}}
{{- if .image.digest -}}
{{ printf "%s@%s" .image.repository .image.digest }}
{{- else -}}
{{ printf "%s:%s" .image.repository $tag }}
{{- end -}}
{{- end -}}

{{/* What every pod runs under. */}}
{{- define "damask.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # A volume of weights holds few files, but walking a network volume takes long: only where the owner is wrong.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "damask.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A pod's scheduling: (dict "root" $ "component" "gateway" "values" .Values.gateway "tolerations" list). */}}
{{- define "damask.scheduling" -}}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat (default list .tolerations) .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
{{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "damask.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* When a pod may be killed: (dict "root" $ "before" seconds before it drains "drains" how many drain in turn). A service that is not gone 2 s
after its time to drain is killed by `damask node`; the rest is for what must be flushed. */}}
{{- define "damask.terminationSeconds" -}}
{{- add .before (mul .drains (add .root.Values.drainGraceSeconds 2)) 13 -}}
{{- end -}}

{{/* Arguments that every service takes. */}}
{{- define "damask.logArgs" -}}
- --log-format={{ .Values.log.format }}
- --log-level={{ .Values.log.level }}
{{- end -}}

{{/* The workers' headless name. */}}
{{- define "damask.workersHost" -}}
{{ include "damask.fullname" . }}-workers.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{/*
The workers of a pod with their ports, as JSON: containers of a pod share its address, so the i-th prefill listens at 9100 + 10 i (health
and metrics one above) and the i-th decode at 9200 + 10 i (and KV two above).
*/}}
{{- define "damask.processes" -}}
{{- $count := dict "prefill" 0 "decode" 0 -}}
{{- $list := list -}}
{{- range .Values.workers.processes -}}
{{- $base := ternary 9100 9200 (eq .role "prefill") -}}
{{- $port := add $base (mul 10 (get $count .role)) | int -}}
{{- $_ := set $count .role (add 1 (get $count .role) | int) -}}
{{- $list = append $list (dict "name" .name "role" .role "gpus" .gpus "config" .config "port" $port "admin" (add $port 1 | int) "kv" (add $port 2 | int)) -}}
{{- end -}}
{{- $list | toJson -}}
{{- end -}}

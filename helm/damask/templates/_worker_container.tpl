{{/*
A container with one worker, or with all of a pod's workers under `damask node`: (dict "root" $ "processes" list).
*/}}
{{- define "damask.workerContainer" -}}
{{- $root := .root -}}
{{- $workers := $root.Values.workers -}}
{{- $onGpus := eq $workers.accelerator "nvidia" -}}
{{- $group := and $onGpus (eq $workers.allocation "devicePlugin") -}}
{{- $image := ternary $root.Values.cudaImage $root.Values.image $onGpus -}}
{{- $first := first .processes -}}
image: {{ include "damask.image" (dict "root" $root "image" $image) }}
imagePullPolicy: {{ $image.pullPolicy }}
args:
  {{- include "damask.logArgs" $root | nindent 2 }}
  - {{ ternary "node" $first.role $group }}
  - --config=/etc/damask/{{ ternary "node" $first.name $group }}.yaml
env:
  - name: POD_NAME
    valueFrom: { fieldRef: { fieldPath: metadata.name } }
  # With the KV port, the address that tickets name.
  - name: POD_IP
    valueFrom: { fieldRef: { fieldPath: status.podIP } }
  - { name: DAMASK_DRAIN_GRACE_S, value: {{ $root.Values.drainGraceSeconds | quote }} }
  {{- if not $group }}
  # Unique in the fleet, and the same after a restart.
  - { name: DAMASK_{{ upper $first.role }}__NAME, value: "$(POD_NAME)-{{ $first.name }}" }
  {{- end }}
  {{- if $onGpus }}
  {{- if not $group }}
  - { name: CUDA_VISIBLE_DEVICES, value: {{ include "damask.gpuList" $first | quote }} }
  {{- end }}
  # docs/kubernetes.md says what each of these is for.
  - name: NCCL_HOSTID
    valueFrom: { fieldRef: { fieldPath: spec.nodeName } }
  - { name: NCCL_SOCKET_IFNAME, value: lo }
  - { name: NCCL_P2P_LEVEL, value: NVL }
  - { name: NCCL_NVLS_ENABLE, value: "0" }
  - { name: NCCL_DEBUG, value: {{ $workers.nccl.debug }} }
  {{- if not $workers.nccl.sysNice }}
  - { name: NCCL_CUMEM_HOST_ENABLE, value: "0" }
  {{- end }}
  {{- end }}
  {{- with $workers.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  {{- range .processes }}
  - { name: {{ .name }}, containerPort: {{ .port }} }
  - { name: {{ .name }}-adm, containerPort: {{ .admin }} }
  {{- if eq .role "decode" }}
  - { name: {{ .name }}-kv, containerPort: {{ .kv }} }
  {{- end }}
  {{- end }}
# Until the weights are loaded nothing else is asked.
startupProbe:
  {{- include "damask.workerProbe" (dict "processes" .processes "group" $group "question" "ready") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add $workers.startupSeconds 4) 5 }}
readinessProbe:
  {{- include "damask.workerProbe" (dict "processes" .processes "group" $group "question" "ready") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
# Forward progress: fails when steps are due and none finishes.
livenessProbe:
  {{- include "damask.workerProbe" (dict "processes" .processes "group" $group "question" "live") | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
resources: {{- include "damask.workerResources" . | nindent 2 }}
securityContext:
  {{- include "damask.containerSecurity" $root | nindent 2 }}
  {{- if and $onGpus $workers.nccl.sysNice }}
    add: [SYS_NICE]
  {{- end }}
volumeMounts:
  - { name: config, mountPath: /etc/damask, readOnly: true }
  {{- if $onGpus }}
  - { name: shm, mountPath: /dev/shm }
  - { name: tmp, mountPath: /tmp }
  {{- end }}
  {{- if $root.Values.model.volume }}
  - { name: model, mountPath: /models, readOnly: true }
  {{- end }}
  {{- with $workers.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* One worker is asked by native gRPC health; several in one container must all be well. */}}
{{- define "damask.workerProbe" -}}
{{- if .group -}}
exec:
  command:
    - damask
    - health
    {{- if eq .question "live" }}
    - --live
    {{- end }}
    {{- range .processes }}
    - --admin=127.0.0.1:{{ .admin }}
    {{- end }}
{{- else if eq .question "live" -}}
grpc: { port: {{ (first .processes).port }}, service: live }
{{- else -}}
grpc: { port: {{ (first .processes).port }} }
{{- end -}}
{{- end -}}

{{- define "damask.gpuList" -}}
{{- $list := list -}}
{{- range .gpus -}}{{- $list = append $list (int . | toString) -}}{{- end -}}
{{- join "," $list -}}
{{- end -}}

{{- define "damask.workerResources" -}}
{{- $workers := .root.Values.workers -}}
{{- $resources := deepCopy $workers.resources -}}
{{- if eq $workers.accelerator "nvidia" -}}
{{- if eq $workers.allocation "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- else -}}
{{- $_ := set $resources.limits "nvidia.com/gpu" (int $workers.gpusPerPod) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

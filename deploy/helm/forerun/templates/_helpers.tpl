{{- /* Names, labels and the pod's parts that several templates share. */ -}}

{{- define "forerun.name" -}}
{{- .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-forerun" .Release.Name) (contains "forerun" .Release.Name)) | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "forerun.selector" -}}
app.kubernetes.io/name: forerun
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "forerun.labels" -}}
{{ include "forerun.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "forerun.metadata" -}}
name: {{ include "forerun.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "forerun.labels" . | nindent 2 }}
{{- end -}}

{{- define "forerun.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end -}}

{{- /* The Secret that has the keys; empty if nobody is asked for one. */ -}}
{{- define "forerun.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.keys -}}
{{- printf "%s-keys" (include "forerun.name" .) -}}
{{- end -}}
{{- end -}}

{{- define "forerun.resources" -}}
{{- $each := dict "cpu" .cpu "memory" .memory -}}
{{- if .ephemeralStorage -}}{{- $_ := set $each "ephemeral-storage" .ephemeralStorage -}}{{- end -}}
{{- if .gpus -}}{{- $_ := set $each .gpuResource .gpus -}}{{- end -}}
requests: {{ toJson $each }}
limits: {{ toJson $each }}
{{- end -}}

{{- define "forerun.env" -}}
- name: HF_HOME
  value: /models/huggingface
- name: FORERUN_CACHE
  value: /models/forerun
- name: TRITON_CACHE_DIR
  value: /models/triton
{{- if .Values.huggingFaceSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.huggingFaceSecret }}, key: token}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "forerun.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "forerun.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "forerun.mounts" -}}
- {name: models, mountPath: /models}
- {name: tmp, mountPath: /tmp}
{{- if .Values.storage.modelsClaim }}
- {name: shared-models, mountPath: /models/shared, readOnly: true}
{{- end }}
{{- if .Values.files }}
- {name: config, mountPath: /config, readOnly: true}
{{- end }}
{{- if and (eq .Values.kind "server") (include "forerun.keysSecret" .) }}
- {name: keys, mountPath: /keys, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Every volume but models, which is a claim of each pod's own. */ -}}
{{- define "forerun.volumes" -}}
- name: tmp
  emptyDir: {}
{{- with .Values.storage.modelsClaim }}
- name: shared-models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if .Values.files }}
- name: config
  configMap: {name: {{ include "forerun.name" . }}}
{{- end }}
{{- if and (eq .Values.kind "server") (include "forerun.keysSecret" .) }}
- name: keys
  secret: {secretName: {{ include "forerun.keysSecret" . }}, items: [{key: keys, path: keys}]}
{{- end }}
{{- end -}}

{{- /* Where pods may run. */ -}}
{{- define "forerun.placement" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- if or .Values.tolerations .Values.resources.gpus }}
tolerations:
  {{- if .Values.resources.gpus }}
  - {key: {{ .Values.resources.gpuResource }}, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- range .Values.tolerations }}
  - {{ toJson . }}
  {{- end }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toJson . }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "forerun.selector" . | nindent 8 }}
{{- end -}}

{{- /* `forerun serve`'s arguments, a JSON list. */ -}}
{{- define "forerun.arguments" -}}
{{- $own := list "serve" .Values.model "--host" "0.0.0.0" "--port" "8000" "--drafter" .Values.drafter "--threads" (toJson .Values.resources.cpu) "--drain-seconds" (toJson .Values.drainSeconds) "--log-format" "json" -}}
{{- if include "forerun.keysSecret" . -}}
{{- $own = concat $own (list "--api-key-file" "/keys/keys") -}}
{{- end -}}
{{- with .Values.storage.kvDiskGib -}}
{{- $own = concat $own (list "--kv-disk" "/models/kv" "--kv-disk-gib" (toJson .)) -}}
{{- end -}}
{{- range $name, $value := .Values.options -}}
{{- range (kindIs "slice" $value | ternary $value (list $value)) -}}
{{- $own = append $own (printf "--%s" $name) -}}
{{- if kindIs "string" . -}}
{{- $own = append $own (printf "%s" .) -}}
{{- else if not (kindIs "bool" .) -}}
{{- $own = append $own (toJson .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $own -}}
{{- end -}}

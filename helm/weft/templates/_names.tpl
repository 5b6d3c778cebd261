{{/*
Names. The longest that is made of one is a StatefulSet's, whose pods carry it in a label with a
hash of 11 characters: 40 leaves room for every suffix. A Service's begins with a letter.
*/}}
{{- define "weft.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if not (contains "weft" $name) -}}{{- $name = printf "%s-weft" $name -}}{{- end -}}
{{- if regexMatch "^[0-9]" $name -}}{{- $name = printf "weft-%s" $name -}}{{- end -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" (trunc 31 $name | trimSuffix "-") (sha256sum .Release.Name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{- define "weft.coordinator" -}}{{ include "weft.fullname" . }}-coordinator{{- end }}
{{- define "weft.replicas" -}}{{ include "weft.fullname" . }}-replicas{{- end }}
{{- define "weft.openai" -}}{{ include "weft.fullname" . }}-openai{{- end }}
{{- define "weft.test" -}}{{ include "weft.fullname" . }}-test{{- end }}
{{- define "weft.monitor" -}}{{ include "weft.fullname" . }}-monitor{{- end }}
{{- define "weft.access" -}}{{ include "weft.fullname" . }}-access{{- end }}

{{- define "weft.catalogClaim" -}}
{{ .Values.coordinator.catalog.existingClaim | default (printf "%s-catalog" (include "weft.fullname" .)) }}
{{- end }}
{{- define "weft.sharedCacheClaim" -}}
{{ .Values.model.sharedCache.existingClaim | default (printf "%s-cache" (include "weft.fullname" .)) }}
{{- end }}
{{- define "weft.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "weft.fullname" .) }}
{{- end }}

{{/* The DNS suffix of the namespace's Services. */}}
{{- define "weft.domain" -}}{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}{{- end }}

{{/* Where replicas, trainers and people reach the coordinator; its certificate has this name. */}}
{{- define "weft.coordinatorHost" -}}{{ include "weft.coordinator" . }}.{{ include "weft.domain" . }}{{- end }}
{{- define "weft.coordinatorTarget" -}}{{ include "weft.coordinatorHost" . }}:50051{{- end }}
{{- define "weft.openaiHost" -}}{{ include "weft.openai" . }}.{{ include "weft.domain" . }}{{- end }}
{{- define "weft.openaiScheme" -}}{{ if .Values.openai.tls }}https{{ else }}http{{ end }}{{- end }}

{{/* Labels that select; they never change. Call with (list . "coordinator"). */}}
{{- define "weft.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: weft
app.kubernetes.io/instance: {{ include "weft.fullname" $root | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object. Call with (list . "coordinator") or (list . "coordinator" more). */}}
{{- define "weft.labels" -}}
{{- $root := index . 0 -}}
{{- $more := dict -}}
{{- if gt (len .) 2 -}}{{- $more = index . 2 | default dict -}}{{- end -}}
{{ include "weft.selector" . }}
app.kubernetes.io/part-of: weft
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_") }}
{{- with merge (dict) $more ($root.Values.commonLabels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Who takes part in side groups: see networkpolicies.yaml. */}}
{{- define "weft.member" -}}
weft-pool: {{ include "weft.fullname" . | quote }}
{{- end }}

{{- define "weft.replicaImage" -}}
{{- $repository := ternary "weft-replica-cuda" "weft-replica-cpu" (gt (int .Values.replicas.gpus) 0) -}}
{{- include "weft.image" (list . .Values.replicas.image $repository) -}}
{{- end }}

{{/* Image and policy of a container. Call with (list . image repository), the last if none is given. */}}
{{- define "weft.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
image: "{{ $image.repository | default (index . 2) }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end }}"
imagePullPolicy: {{ $image.pullPolicy }}
{{- end }}

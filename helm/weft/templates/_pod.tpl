{{/* Labels and annotations of a server's pod. Call with (list . "coordinator" values). */}}
{{- define "weft.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
labels:
  # Never the version: an upgrade that changes no pod restarts none.
  {{- include "weft.selector" . | nindent 2 }}
  {{- include "weft.member" $root | nindent 2 }}
  {{- with merge (dict) ($values.podLabels | default dict) ($root.Values.commonLabels | default dict) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What Pod Security's `restricted` level asks of a pod ... */}}
{{- define "weft.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.securityContext.runAsUser }}
  runAsGroup: {{ int64 .Values.securityContext.runAsGroup }}
  fsGroup: {{ int64 .Values.securityContext.runAsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
serviceAccountName: {{ include "weft.serviceAccount" . | quote }}
# Nothing here calls the API server.
automountServiceAccountToken: false
# A Service named weft would set WEFT_PORT and its like, which look like options.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* ... and of a container. */}}
{{- define "weft.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Where pods are put. Call with (list . values). */}}
{{- define "weft.placement" -}}
{{- $values := index . 1 -}}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Whether callers are known by tokens; else by certificates, or not at all. */}}
{{- define "weft.byTokens" -}}
{{- if and (not .Values.insecure) (eq .Values.access.by "tokens") -}}true{{- end -}}
{{- end }}

{{/* Whether Prometheus has to show a certificate. */}}
{{- define "weft.monitorCertificate" -}}
{{- with .Values.metrics -}}
{{- if and .auth .serviceMonitor.enabled (not $.Values.insecure) (eq $.Values.access.by "certificates") -}}true{{- end -}}
{{- end -}}
{{- end }}

{{/* The Secret of a process's certificate. Call with (list . "coordinator"). */}}
{{- define "weft.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.tls.certManager.enabled -}}
{{ include "weft.fullname" $root }}-{{ index . 1 }}-tls
{{- else -}}
{{ get $root.Values.tls (printf "%sSecret" (index . 1)) }}
{{- end -}}
{{- end }}

{{/*
Options of a server for what it shows and whom it lets in. The files are named, never read ahead:
certificates, tokens and rules change under a running process, which is why nothing restarts for
them and why no volume here has a subPath.
*/}}
{{- define "weft.credentialArgs" -}}
{{- if .Values.insecure }}
- --insecure
{{- else }}
- --tls-cert=/etc/weft/tls/tls.crt
- --tls-key=/etc/weft/tls/tls.key
- --tls-ca=/etc/weft/tls/ca.crt
- --access=/etc/weft/access/access.toml
{{- if include "weft.byTokens" . }}
- --token-file=/etc/weft/token/token
{{- end }}
{{- end }}
{{- end }}

{{/* The same of a client, from its environment. */}}
{{- define "weft.credentialEnv" -}}
{{- if not .Values.insecure }}
{{- if not (include "weft.byTokens" .) }}
- {name: WEFT_TLS_CERT, value: /etc/weft/tls/tls.crt}
- {name: WEFT_TLS_KEY, value: /etc/weft/tls/tls.key}
{{- else }}
- {name: WEFT_TOKEN_FILE, value: /etc/weft/token/token}
{{- end }}
- {name: WEFT_TLS_CA, value: /etc/weft/tls/ca.crt}
{{- end }}
{{- end }}

{{- define "weft.credentialMounts" -}}
{{- if not .Values.insecure }}
- {name: tls, mountPath: /etc/weft/tls, readOnly: true}
{{- if include "weft.byTokens" . }}
- {name: token, mountPath: /etc/weft/token, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{/* Call with (list . "coordinator"). */}}
{{- define "weft.credentialVolumes" -}}
{{- $root := index . 0 -}}
{{- $process := index . 1 -}}
{{- if not $root.Values.insecure }}
- name: tls
  secret: {secretName: {{ include "weft.tlsSecret" . | quote }}, defaultMode: 0440}
{{- if include "weft.byTokens" $root }}
- name: token
  secret: {secretName: {{ (get $root.Values.access.tokens $process).secret | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end }}

{{/* A server's rules. */}}
{{- define "weft.accessMounts" -}}
{{- if not .Values.insecure }}
- {name: access, mountPath: /etc/weft/access, readOnly: true}
{{- end }}
{{- end }}

{{- define "weft.accessVolumes" -}}
{{- if not .Values.insecure }}
- name: access
  configMap: {name: {{ .Values.access.existingConfigMap | default (include "weft.access" .) | quote }}}
{{- end }}
{{- end }}

{{/* Options that both servers have. */}}
{{- define "weft.serverArgs" -}}
- --health=0.0.0.0:50052
{{- if .Values.metrics.enabled }}
- --metrics=0.0.0.0:9090
{{- if .Values.metrics.auth }}
- --metrics-auth
{{- end }}
{{- end }}
- --log-format={{ .Values.logFormat }}
- --log-level={{ .Values.logLevel }}
{{- if .Values.tracesEndpoint }}
- --traces
{{- end }}
{{- include "weft.credentialArgs" . }}
{{- end }}

{{- define "weft.tracesEnv" -}}
{{- with .Values.tracesEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* What the model is found by, in a replica and in the test's pod. */}}
{{- define "weft.model" -}}{{ if .Values.model.tiny }}/models/tiny{{ else }}{{ .Values.model.name }}{{ end }}{{- end }}

{{- define "weft.modelEnv" -}}
{{- $given := list -}}
{{- range .Values.model.env -}}{{- $given = append $given .name -}}{{- end -}}
# The image's home is read-only; caches go below this one.
- {name: HOME, value: /var/cache/weft}
- {name: USER, value: weft}
- {name: DO_NOT_TRACK, value: "1"}
{{- if and (or .Values.model.tiny .Values.model.claim .Values.model.volume) (not (has "HF_HUB_OFFLINE" $given)) }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if .Values.model.sharedCache.enabled }}
- {name: HF_HOME, value: /var/cache/huggingface}
{{- end }}
{{- with .Values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
{{- end }}
{{- with .Values.model.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "weft.modelMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/weft}
{{- if .Values.model.sharedCache.enabled }}
- {name: shared-cache, mountPath: /var/cache/huggingface}
{{- end }}
{{- if or .Values.model.tiny .Values.model.claim .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "weft.modelVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 4Gi}
- name: cache
  emptyDir: {sizeLimit: {{ include "weft.number" .Values.model.cacheGib }}Gi}
{{- if .Values.model.sharedCache.enabled }}
- name: shared-cache
  persistentVolumeClaim: {claimName: {{ include "weft.sharedCacheClaim" . | quote }}}
{{- end }}
{{- if .Values.model.tiny }}
- name: models
  emptyDir: {sizeLimit: 256Mi}
{{- else if .Values.model.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.model.claim | quote }}, readOnly: true}
{{- else if .Values.model.volume }}
- name: models
  {{- toYaml .Values.model.volume | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Init containers of a pod that loads the model; one makes the same tiny model, bit by bit, in every
pod. Call with (list . initContainers).
*/}}
{{- define "weft.initContainers" -}}
{{- $more := index . 1 -}}
{{- with index . 0 -}}
{{- if or .Values.model.tiny $more }}
initContainers:
{{- if .Values.model.tiny }}
  - name: model
    {{- include "weft.replicaImage" . | nindent 4 }}
    {{- include "weft.containerSecurity" . | nindent 4 }}
    command:
      - python
      - -c
      - |
        from pathlib import Path
        from weft_rl.cli.demo.tiny_model import make_model
        make_model(Path("/models/tiny"))
    env:
      {{- include "weft.modelEnv" . | nindent 6 }}
    resources: {{- include "weft.resources" .Values.model.resources | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /var/cache/weft}
      - {name: models, mountPath: /models}
{{- end }}
{{- with $more }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A container's resources; what of them is null is not said. */}}
{{- define "weft.resources" -}}
{{- $said := dict -}}
{{- range $kind, $quantities := . -}}{{- with $quantities -}}{{- $_ := set $said $kind . -}}{{- end -}}{{- end -}}
{{- toYaml $said -}}
{{- end }}

{{/* A list, one below the other; nothing of an empty one. */}}
{{- define "weft.items" -}}
{{- with . }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* A claim that the chart makes. Call with (list . component name accessMode values). */}}
{{- define "weft.claim" -}}
{{- $values := index . 4 -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ index . 2 | quote }}
  namespace: {{ (index . 0).Release.Namespace | quote }}
  labels: {{- include "weft.labels" (list (index . 0) (index . 1)) | nindent 4 }}
  {{- if eq $values.whenDeleted "Retain" }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
spec:
  accessModes: [{{ index . 3 }}]
  {{- with $values.storageClassName }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests: {storage: {{ include "weft.number" $values.size }}}
{{- end }}

{{/* How a Service is reached; its metadata, and its spec but for selector and ports. */}}
{{- define "weft.serviceAnnotations" -}}
{{- with .annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- define "weft.serviceType" -}}
type: {{ .type }}
{{- with .loadBalancerClass }}
loadBalancerClass: {{ . | quote }}
{{- end }}
{{- with .loadBalancerSourceRanges }}
loadBalancerSourceRanges: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .externalTrafficPolicy }}
externalTrafficPolicy: {{ . }}
{{- end }}
{{- end }}

{{/*
What gateways and meshes take a port for; they guess HTTP without TLS from its name. Call with (list
tls plaintext type). A load balancer's port is not said to speak TLS: Azure's would then ask "/".
*/}}
{{- define "weft.appProtocol" -}}
{{- if not (index . 0) -}}
{{- with index . 1 }}appProtocol: {{ . }}{{ end -}}
{{- else if ne (index . 2) "LoadBalancer" -}}
appProtocol: https
{{- end -}}
{{- end }}

{{/* A probe of the health port. Call with (list values) or (list values service). */}}
{{- define "weft.probe" -}}
grpc: {port: 50052{{ if gt (len .) 1 }}, service: {{ index . 1 }}{{ end }}}
{{ toYaml (index . 0) }}
{{- end }}

{{/* A quantity of Kubernetes' ("64Gi", "500M", "1.5Gi", 1073741824) in MiB; values.schema.json says its form. */}}
{{- define "weft.mebibytes" -}}
{{- $text := . | toString -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- if kindIs "float64" . -}}
{{- divf . 1048576.0 -}}
{{- else -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- divf (mulf (trimSuffix $unit $text | float64) (get $units $unit)) 1048576.0 -}}
{{- end -}}
{{- end }}

{{/* A number in digits, or text as it is: of a large or a small number Go writes 1e+06. */}}
{{- define "weft.number" -}}
{{- if not (kindIs "float64" .) -}}{{ . }}
{{- else if eq . (floor .) -}}{{ int64 . }}
{{- else -}}{{ regexReplaceAll "0+$" (printf "%.9f" .) "" }}
{{- end -}}
{{- end }}

{{/* Whether copies of the base lie in host memory. */}}
{{- define "weft.stagesOnHost" -}}
{{- if not (has .Values.replicas.staging (list "device" "in-place")) -}}true{{- end -}}
{{- end }}

{{/* What --staging-memory-gib bounds: the copy that is received, and those that are kept. */}}
{{- define "weft.stagingGib" -}}
{{- $memory := .Values.replicas.memory -}}
{{- include "weft.number" (addf $memory.stagingGib $memory.retainedGib) -}}
{{- end }}

{{/* What a replica may take of host memory, in MiB, rounded up. */}}
{{- define "weft.replicaMebibytes" -}}
{{- $memory := .Values.replicas.memory -}}
{{- $gib := addf $memory.modelLoadGib $memory.adaptersGib $memory.shmGib -}}
{{- if include "weft.stagesOnHost" . -}}
{{- $gib = addf $gib $memory.stagingGib $memory.retainedGib -}}
{{- else if ne .Values.replicas.spill.kind "none" -}}
{{- /* What is read from the spill directory is staged on the host first. */ -}}
{{- $gib = addf $gib $memory.stagingGib -}}
{{- end -}}
{{- if .Values.replicas.enableSleep -}}
{{- /* Asleep, its weights lie on the host, or a copy of them. */ -}}
{{- $gib = addf $gib $memory.stagingGib -}}
{{- end -}}
{{- ceil (mulf $gib 1024.0) | int64 -}}
{{- end }}

{{/* The sum in words, for a refusal. */}}
{{- define "weft.memoryInWords" -}}
{{- $memory := .Values.replicas.memory -}}
modelLoadGib {{ $memory.modelLoadGib }}
{{- if include "weft.stagesOnHost" . }} + stagingGib {{ $memory.stagingGib }} + retainedGib {{ $memory.retainedGib }}
{{- else if ne .Values.replicas.spill.kind "none" }} + stagingGib {{ $memory.stagingGib }}
{{- end }}
{{- if .Values.replicas.enableSleep }} + stagingGib {{ $memory.stagingGib }}, asleep
{{- end }} + adaptersGib {{ $memory.adaptersGib }} + shmGib {{ $memory.shmGib }}
{{- end }}

{{/*
What /dev/shm has to have for vLLM to start, in MiB; `weft doctor` asks for as much. Each of its
worker processes makes a queue of 10 messages of 24 MiB, after one of 10 of
VLLM_MQ_MAX_CHUNK_BYTES_MB, and wants as much to be free as the queue may hold. 16 MiB are for
what is in others by then. On a CPU, ranks that reduce with each other map 4 MiB for each thread
before. On one GPU there are no worker processes.
*/}}
{{- define "weft.leastShmMebibytes" -}}
{{- $values := .Values.replicas -}}
{{- $ranks := int $values.tensorParallelSize -}}
{{- $chunk := 16 -}}
{{- $cpus := include "weft.mebibytes" (dig "requests" "cpu" "1" ($values.resources | default dict)) | float64 -}}
{{- $threads := ceil (round (divf (mulf $cpus 1048576.0) $ranks) 3) | int -}}
{{- range concat (.Values.model.env | default list) ($values.env | default list) -}}
{{- if and (eq .name "VLLM_MQ_MAX_CHUNK_BYTES_MB") .value -}}{{- $chunk = int .value -}}{{- end -}}
{{- if and (eq .name "OMP_NUM_THREADS") .value -}}{{- $threads = int .value -}}{{- end -}}
{{- end -}}
{{- if and $values.gpus (eq $ranks 1) -}}
0
{{- else if or $values.gpus (eq $ranks 1) -}}
{{- add (max 240 (mul 10 $chunk)) 16 -}}
{{- else -}}
{{- add (max 240 (mul 10 $chunk)) 16 (mul 4 $ranks (max 1 $threads)) -}}
{{- end -}}
{{- end }}

{{- define "weft.shmMebibytes" -}}{{ ceil (mulf .Values.replicas.memory.shmGib 1024.0) | int64 }}{{- end }}

{{/* A container's resources with its memory, GPUs and RDMA devices filled in. */}}
{{- define "weft.replicaResources" -}}
{{- $values := .Values.replicas -}}
{{- $resources := $values.resources | default dict -}}
{{- $limits := deepCopy ($resources.limits | default dict) -}}
{{- $requests := deepCopy ($resources.requests | default dict) -}}
{{- if not $limits.memory -}}
{{- $_ := set $limits "memory" (printf "%sMi" (include "weft.replicaMebibytes" .)) -}}
{{- end -}}
{{- /* Memory files cannot be taken back from a pod: what it may take, it is given. */ -}}
{{- if not $requests.memory -}}{{- $_ := set $requests "memory" $limits.memory -}}{{- end -}}
{{- if $values.gpus -}}
{{- $_ := set $limits $values.gpuResource (int64 $values.gpus) -}}
{{- end -}}
{{- if $values.rdma.enabled -}}
{{- range $name, $count := $values.rdma.resources -}}{{- $_ := set $limits $name (int64 $count) -}}{{- end -}}
{{- end -}}
{{- dict "requests" $requests "limits" $limits | toYaml -}}
{{- end }}

{{- define "weir.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "weir.fullname" -}}
{{- $name := include "weir.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Cluster-wide objects carry the namespace too: the same release name may be used in two of them. */ -}}
{{- define "weir.clustername" -}}
{{- printf "%s-%s" .Release.Namespace (include "weir.fullname" .) -}}
{{- end -}}

{{- define "weir.serviceaccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "weir.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "weir.selector" -}}
app.kubernetes.io/name: {{ include "weir.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "weir.labels" -}}
{{ include "weir.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "weir.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}

{{- /* What the operator does to the resources and their children: written in one place, bound per cluster or per namespace. */ -}}
{{- define "weir.rules" -}}
- apiGroups: [weir.dev]
  resources: [inferencedeployments]
  verbs: [get, list, watch]
- apiGroups: [weir.dev]
  resources: [inferencedeployments/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [secrets] # written, never read
  verbs: [create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- end -}}

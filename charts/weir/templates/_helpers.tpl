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

{{- /* Of this release alone; with the usual names the one that `weir-operator run` has by itself. */ -}}
{{- define "weir.lease" -}}
{{- printf "%s-operator" (include "weir.fullname" .) -}}
{{- end -}}

{{- define "weir.serviceaccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "weir.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "weir.selector" -}}
app.kubernetes.io/name: {{ include "weir.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* part-of is fixed: whoever looks for the operator finds it by this and its component, whatever it was named. */ -}}
{{- define "weir.labels" -}}
{{ include "weir.selector" . }}
app.kubernetes.io/part-of: weir
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "weir.many" -}}
{{- if gt (int .Values.replicaCount) 1 }}yes{{ end -}}
{{- end -}}

{{- define "weir.testnamespace" -}}
{{- .Values.test.namespace | default (first (append .Values.watch.namespaces .Release.Namespace)) -}}
{{- end -}}

{{- define "weir.testname" -}}
{{- printf "%s-test" (include "weir.fullname" . | trunc 47 | trimSuffix "-") -}}
{{- end -}}

{{- define "weir.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}

{{- /* What the operator does to the resources and their children: written in one place, bound per cluster or per namespace.
A child that may be asked for and not asked for is deleted by name; the others go with their owner. */ -}}
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
  resources: [serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets] # written, never read
  verbs: [create, patch]
- apiGroups: [""]
  resources: [pods] # patched with what their end would cost, before one of them ends
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com] # where the cluster has them: listed now and then, since they come and go
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, create, patch, delete]
{{- end -}}

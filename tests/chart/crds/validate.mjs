// Validates objects of operators (Prometheus', cert-manager, KEDA, ...) by their CRDs' schemas.
//
//   node validate.mjs NPM_DIRECTORY < objects.json      prints a list of errors as JSON
//
// The schemas are compiled and pass over fields that they do not have, as a server in its default
// mode drops them. So each object is handed over in a proxy that notes what is looked at: a field
// that no schema looks at is none of the kind's.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const packages = pathToFileURL(`${process.argv[2]}/node_modules/@kubernetes-models/`);
const monitoring = "prometheus-operator/monitoring.coreos.com/v1";
const modules = {
  ServiceMonitor: `${monitoring}/ServiceMonitor.js`,
  PrometheusRule: `${monitoring}/PrometheusRule.js`,
  Certificate: "cert-manager/cert-manager.io/v1/Certificate.mjs",
  ScaledObject: "keda/keda.sh/v1alpha1/ScaledObject.js",
  HTTPRoute: "gateway-api/gateway.networking.k8s.io/v1/HTTPRoute.js",
  BackendTLSPolicy: "gateway-api/gateway.networking.k8s.io/v1/BackendTLSPolicy.js",
  GRPCRoute: "gateway-api/gateway.networking.k8s.io/v1alpha2/GRPCRoute.js",
  TLSRoute: "gateway-api/gateway.networking.k8s.io/v1alpha2/TLSRoute.js",
  ApplicationSet: "argo-cd/argoproj.io/v1alpha1/ApplicationSet.js",
  HelmRepository: "flux-cd/source.toolkit.fluxcd.io/v1beta2/HelmRepository.js",
  HelmRelease: "flux-cd/helm.toolkit.fluxcd.io/v2beta2/HelmRelease.js",
};
// Kinds whose later versions npm has not; what is used of them here is the same in both.
const later = {
  "gateway.networking.k8s.io/v1alpha2": "gateway.networking.k8s.io/v1",
  "source.toolkit.fluxcd.io/v1beta2": "source.toolkit.fluxcd.io/v1",
  "helm.toolkit.fluxcd.io/v2beta2": "helm.toolkit.fluxcd.io/v2",
};

// What a kind leaves to others.
const free = [/^\/spec\/generators\/0\/list\/elements\//, /^\/spec\/values\//];

function noting(value, path, seen) {
  if (value === null || typeof value !== "object") return value;
  const children = new Map();
  return new Proxy(value, {
    get(target, key) {
      if (typeof key !== "string" || !Object.hasOwn(target, key)) return Reflect.get(target, key);
      const here = `${path}/${key}`;
      seen.add(here);
      if (!children.has(key)) children.set(key, noting(target[key], here, seen));
      return children.get(key);
    },
  });
}

function* paths(value, path = "") {
  if (value === null || typeof value !== "object") return;
  for (const [key, child] of Object.entries(value)) {
    yield `${path}/${key}`;
    yield* paths(child, `${path}/${key}`);
  }
}

const errors = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const name = `${object.kind} ${object.metadata.name}`;
  const { [object.kind]: Model } = await import(new URL(modules[object.kind], packages));
  if (object.apiVersion === later[Model.apiVersion]) object.apiVersion = Model.apiVersion;
  if (object.apiVersion !== Model.apiVersion) errors.push(`${name}: ${object.apiVersion}`);
  const seen = new Set();
  try {
    Model.prototype.validate.call(noting(object, "", seen)); // a Model of its own would be a copy
  } catch (error) {
    errors.push(`${name}: ${error.message}`);
    for (const one of error.errors ?? []) errors.push(`${name}: ${one.instancePath}: ${one.message}`);
  }
  for (const path of paths(object)) {
    if (!seen.has(path) && !free.some((each) => each.test(path))) errors.push(`${name}: ${path} is unknown`);
  }
}
console.log(JSON.stringify(errors));

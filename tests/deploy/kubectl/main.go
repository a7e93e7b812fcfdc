// kubectl of Kubernetes' own module, as its cmd/kubectl makes it. That one is in k8s.io/kubernetes, whose
// go.mod is the kubelet's here: what that adds would have Kubernetes built anew.
package main

import (
	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}

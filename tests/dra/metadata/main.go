// What a container learns of its devices, by upstream's own package (KEP-5304), as JSON. KubeVirt reads
// the files in this way.
//
//	read-metadata claim NAME REQUEST | read-metadata template POD-CLAIM REQUEST
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

const driver = "fpga.intel.com"

func main() {
	told, err := read(os.Args[1], os.Args[2], os.Args[3])
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(told); err != nil {
		panic(err)
	}
}

func read(kind, claim, request string) (*metadata.DeviceMetadata, error) {
	find, path := devicemetadata.ReadResourceClaimMetadata, metadata.ResourceClaimFilePath
	if kind == "template" {
		find, path = devicemetadata.ReadResourceClaimTemplateMetadata, metadata.ResourceClaimTemplateFilePath
	}
	if err := valid(path(driver, claim, request)); err != nil {
		return nil, err
	}
	return find(claim, request)
}

// valid says what is wrong with any of the stream's objects: the package reads the first that it knows.
func valid(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	stream := json.NewDecoder(file)
	for number := 0; stream.More(); number++ {
		var wrong error
		var one metadata.DeviceMetadata
		check := devicemetadata.DecodeMetadataWithValidationResult(&wrong)
		if err := devicemetadata.DecodeMetadataFromStream(stream, &one, check); err != nil {
			return err
		}
		if wrong != nil {
			return fmt.Errorf("object %d: %w", number, wrong)
		}
	}
	return nil
}

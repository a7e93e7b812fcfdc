/*
 * Opens the first FPGA region that the container was given, maps its registers and says which accelerator is there.
 *
 *     gcc -O2 -o hello_fpga hello_fpga.c && ./hello_fpga
 *
 * FPGA_DEVICE_1 is a port of Linux' DFL drivers (/dev/dfl-port.0), or VFIO groups (/dev/vfio/7,/dev/vfio/8).
 * Then FPGA_FUNCTIONS_<DEVICE ID> has the PCI functions in the same order (0000:3b:00.5,0000:3b:00.6).
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <linux/fpga-dfl.h>
#include <linux/vfio.h>

extern char **environ;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* A copy of the first of several values that are separated by commas. */
static char *first(const char *values)
{
	char *value = strndup(values, strcspn(values, ","));

	if (value == NULL)
		die("strndup");
	return value;
}

static volatile uint64_t *map(int fd, uint64_t size, uint64_t offset)
{
	void *registers = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);

	if (registers == MAP_FAILED)
		die("mmap of the accelerator's registers");
	return registers;
}

static volatile uint64_t *open_port(const char *path)
{
	struct dfl_fpga_port_region_info info = {.argsz = sizeof(info), .index = DFL_PORT_REGION_INDEX_AFU};
	int fd = open(path, O_RDWR | O_CLOEXEC);

	if (fd < 0)
		die(path);
	if (ioctl(fd, DFL_FPGA_PORT_GET_REGION_INFO, &info) < 0)
		die("DFL_FPGA_PORT_GET_REGION_INFO");
	return map(fd, info.size, info.offset);
}

/* FPGA_FUNCTIONS_<ID> of the FPGA_DEVICE_<ID> that has the same value as FPGA_DEVICE_1. */
static const char *functions_of(const char *nodes)
{
	char name[128];

	for (char **variable = environ; *variable != NULL; variable++) {
		const char *id = *variable + strlen("FPGA_DEVICE_");
		const char *value = strchr(*variable, '=');

		if (value == NULL || strncmp(*variable, "FPGA_DEVICE_", strlen("FPGA_DEVICE_")) != 0 ||
		    strcmp(value + 1, nodes) != 0)
			continue;
		snprintf(name, sizeof(name), "FPGA_FUNCTIONS_%.*s", (int)(value - id), id);
		if (getenv(name) != NULL)
			return getenv(name);
	}
	fprintf(stderr, "no FPGA_FUNCTIONS_<DEVICE ID> belongs to %s\n", nodes);
	exit(1);
}

static volatile uint64_t *open_function(const char *nodes)
{
	struct vfio_group_status status = {.argsz = sizeof(status)};
	struct vfio_region_info info = {.argsz = sizeof(info), .index = VFIO_PCI_BAR0_REGION_INDEX};
	char *path = first(nodes), *address = first(functions_of(nodes));
	int container = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC);
	int group = open(path, O_RDWR | O_CLOEXEC);
	int function;

	if (container < 0 || group < 0)
		die(path);
	if (ioctl(group, VFIO_GROUP_GET_STATUS, &status) < 0 || !(status.flags & VFIO_GROUP_FLAGS_VIABLE))
		die("VFIO_GROUP_GET_STATUS: the group is not viable");
	/* In this order: the kernel gives a function out only once its DMA is confined. */
	if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container) < 0)
		die("VFIO_GROUP_SET_CONTAINER");
	if (ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) < 0)
		die("VFIO_SET_IOMMU");
	function = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, address);
	if (function < 0)
		die(address);
	if (ioctl(function, VFIO_DEVICE_GET_REGION_INFO, &info) < 0)
		die("VFIO_DEVICE_GET_REGION_INFO");
	free(path);
	free(address);
	return map(function, info.size, info.offset);
}

int main(void)
{
	const char *nodes = getenv("FPGA_DEVICE_1");
	volatile uint64_t *registers;

	if (nodes == NULL) {
		fprintf(stderr, "FPGA_DEVICE_1 is not set: does the container ask for an FPGA in its limits?\n");
		return 1;
	}
	registers = strncmp(nodes, "/dev/vfio/", strlen("/dev/vfio/")) == 0 ? open_function(nodes)
									    : open_port(nodes);
	/* Every AFU begins with its header and its id, the id's lower half first; to be read in 64 bits. */
	printf("%s: accelerator %016" PRIx64 "%016" PRIx64 "\n", nodes, registers[2], registers[1]);
	return 0;
}

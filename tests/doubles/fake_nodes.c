/*
 * Preloaded into a program: /dev/dfl-port.0, /dev/vfio/vfio and /dev/vfio/7 are there, with an accelerator behind them.
 *
 * Stricter than it is complete: calls in an order that the kernel would refuse are refused, so that an example which
 * passes here does what the drivers want (drivers/fpga/dfl-afu-main.c, drivers/vfio/group.c).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <linux/fpga-dfl.h>
#include <linux/vfio.h>

enum { PORT = 1, CONTAINER, GROUP, FUNCTION };

#define SIZE 0x40000
#define OFFSET 0x100000 /* where the registers begin in the file, so that a program has to ask */

static char kinds[1024];
static int container_set, iommu_set;

static int refuse(int error)
{
	errno = error;
	return -1;
}

static int make(int kind)
{
	uint64_t registers[3] = {0x1000000000000000, 0xf89e433683f9040b, 0xd8424dc4a4a3c413};
	int fd = memfd_create("node", MFD_CLOEXEC);

	if (fd < 0 || fd >= (int)sizeof(kinds) || ftruncate(fd, OFFSET + SIZE) < 0 ||
	    pwrite(fd, registers, sizeof(registers), OFFSET) != sizeof(registers))
		abort();
	kinds[fd] = (char)kind;
	return fd;
}

static int special(const char *path, int flags)
{
	static const char *const paths[] = {NULL, "/dev/dfl-port.0", "/dev/vfio/vfio", "/dev/vfio/7"};

	for (int kind = PORT; kind <= GROUP; kind++)
		if (strcmp(path, paths[kind]) == 0)
			return (flags & O_ACCMODE) == O_RDWR ? make(kind) : refuse(EACCES);
	if (strncmp(path, "/dev/dfl-", 9) == 0 || strncmp(path, "/dev/vfio", 9) == 0)
		return refuse(ENOENT);
	return -2;
}

#define DEFINE_OPEN(name)                                                                                              \
	int name(const char *path, int flags, ...)                                                                     \
	{                                                                                                              \
		int (*next)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);        \
		int fd = special(path, flags);                                                                         \
		va_list arguments;                                                                                     \
		int mode;                                                                                              \
                                                                                                                       \
		va_start(arguments, flags);                                                                            \
		mode = va_arg(arguments, int);                                                                         \
		va_end(arguments);                                                                                     \
		return fd == -2 ? next(path, flags, mode) : fd;                                                        \
	}

DEFINE_OPEN(open)
DEFINE_OPEN(open64)

static int port_ioctl(unsigned long request, struct dfl_fpga_port_region_info *info)
{
	if (request != DFL_FPGA_PORT_GET_REGION_INFO)
		return refuse(EINVAL);
	if (info->argsz < sizeof(*info) || info->padding || info->index != DFL_PORT_REGION_INDEX_AFU)
		return refuse(EINVAL);
	info->flags = DFL_PORT_REGION_READ | DFL_PORT_REGION_WRITE | DFL_PORT_REGION_MMAP;
	info->size = SIZE;
	info->offset = OFFSET;
	return 0;
}

static int group_ioctl(unsigned long request, void *argument)
{
	if (request == VFIO_GROUP_GET_STATUS) {
		((struct vfio_group_status *)argument)->flags = VFIO_GROUP_FLAGS_VIABLE;
		return 0;
	}
	if (request == VFIO_GROUP_SET_CONTAINER && kinds[*(int *)argument] == CONTAINER) {
		container_set = 1;
		return 0;
	}
	if (request == VFIO_GROUP_GET_DEVICE_FD && iommu_set)
		return strcmp(argument, "0000:3b:00.5") == 0 ? make(FUNCTION) : refuse(ENODEV);
	return refuse(EINVAL);
}

static int function_ioctl(unsigned long request, struct vfio_region_info *info)
{
	if (request != VFIO_DEVICE_GET_REGION_INFO || info->argsz < sizeof(*info) ||
	    info->index != VFIO_PCI_BAR0_REGION_INDEX)
		return refuse(EINVAL);
	info->size = SIZE;
	info->offset = OFFSET;
	return 0;
}

int ioctl(int fd, unsigned long request, ...)
{
	int (*next)(int, unsigned long, ...) = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
	va_list arguments;
	void *argument;

	va_start(arguments, request);
	argument = va_arg(arguments, void *);
	va_end(arguments);
	switch (fd >= 0 && fd < (int)sizeof(kinds) ? kinds[fd] : 0) {
	case PORT:
		return port_ioctl(request, argument);
	case GROUP:
		return group_ioctl(request, argument);
	case CONTAINER:
		if (request != VFIO_SET_IOMMU || (uintptr_t)argument != VFIO_TYPE1v2_IOMMU || !container_set)
			return refuse(EINVAL);
		iommu_set = 1;
		return 0;
	case FUNCTION:
		return function_ioctl(request, argument);
	default:
		return next(fd, request, argument);
	}
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Plays FPGA cards to the unmodified DFL drivers, on the memory of ivshmem devices.
 *
 * Each ivshmem-plain device (1af4:1110) gets the PCI ids of an Intel PAC A10 (8086:09c4), its
 * memory becomes BAR 0 and is filled with the registers of a card: an FME with error, thermal,
 * power, memory and PR features, and ports with an AFU each. dfl-pci then binds by its own table.
 *
 * Memory does not answer. There is no thread that does: the drivers wait for the hardware with
 * readq_poll_timeout(), which begins by asking for the time, and a kprobe on ktime_get() lets the
 * card answer in the driver's own context, before it looks. So nothing depends on who gets the
 * processor when, not even the 1 ms that a port has to acknowledge its reset. Further kprobes, on functions of the drivers,
 * see an image as it is streamed (the card keeps its first sixteen bytes as the AFU id) and clear
 * the error registers that a driver cleared by writing ones.
 *
 * The devices behind the third are no cards: they play the virtual functions of the first one where
 * that is laid out as an OFS card, whose port has no AFU. BAR 0 of each begins with an AFU's header.
 * Which of them are the card's is the file functions; sriov_numvfs links and unlinks these as a driver
 * that makes and removes them.
 * They hang on buses of their own, so that each has an IOMMU group; links in sysfs say whose they
 * are, since nothing else makes virtual functions of ivshmem devices.
 *
 * Faults are files of debugfs, fakedfl/<PCI address>/, for a test to write while everything runs:
 *
 *   layout		"ports id id": power-up with so many ports and the two halves of that interface
 *			id (hexadecimal); with a 1 after them on a board that has a management
 *			controller, with a 2 as an OFS card; only while dfl-pci is unbound
 *   pr_err		bits for PR_ERR; the next PR that gets to its end fails, then 0 again
 *   pr_stuck		1: the next PR never ends (ETIMEDOUT after 8 s), then 0 again
 *   pr_ports		bits by port: for whose PRs the two above are meant; all at first
 *   pr_deaf		1: PR resets are not acknowledged (ETIMEDOUT after 8 s)
 *   port_deaf		bits by port: resets are not acknowledged (ETIMEDOUT after 1 ms)
 *   stall_ms		a PR ends so much later
 *   memory_busy	bits by bank: never cleared (ETIMEDOUT after 5 s)
 *   poke		"offset value", both hexadecimal: write a register
 *   functions		bits: which of those devices are its virtual functions, the first two at first
 *   absent		1: what a rescan of the bus finds at its address is no card
 *   images		the AFU ids that the ports hold, one a line, in reset too
 *   prs, memory_clears	how many PRs began; how many banks were cleared
 *
 * The management controller is that of a D5005: where spi-altera-dfl and intel-m10-bmc would talk to
 * a MAX 10 through an SPI master, two small drivers stand here that make the same devices, so that
 * the unmodified intel-m10-bmc-hwmon finds its registers in BAR 0 too.
 *
 * The registers' offsets are those of drivers/fpga/dfl.h and the drivers of the features.
 */

#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/fpga/fpga-mgr.h>
#include <linux/hrtimer.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/kprobes.h>
#include <linux/dfl.h>
#include <linux/mfd/core.h>
#include <linux/mfd/intel-m10-bmc.h>
#include <linux/module.h>
#include <linux/nodemask.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/seq_file.h>
#include <linux/spi/spi.h>
#include <linux/uaccess.h>
#include <asm/unaligned.h>

#define MAX_CARDS	3
#define FUNCTIONS	4
#define MAX_PORTS	4

/* Where the features lie in BAR 0. */
#define THERMAL		0x1000
#define POWER		0x2000
#define EMIF		0x3000
#define ERRORS		0x4000
#define PR		0x5000
#define SPI		0x6000
#define BMC		0x10000	/* its system registers, 64 bits each */
#define PORT(n)		(0x100000ULL * ((n) + 1))
#define PORT_ERRORS	0x1000	/* from the port */
#define AFU		0x40000	/* from the port */

#define PR_CTRL		(PR + 0x8)
#define PR_STS		(PR + 0x10)
#define PR_ERR		(PR + 0x20)
#define PORT_CTRL	0x38

#define CTRL_RST	BIT_ULL(0)	/* the port's and the PR's */
#define CTRL_RSTACK	BIT_ULL(4)
#define PR_CTRL_REGION	GENMASK_ULL(9, 7)
#define PR_CTRL_START	BIT_ULL(12)
#define PR_CTRL_COMPLETE BIT_ULL(13)
#define PR_STS_CREDITS	0x1ffULL
#define PR_STS_FAILED	BIT_ULL(16)

#define EMIF_BANKS	0x3ULL
#define SPI_ID		0xe	/* FME_FEATURE_ID_MAX10_SPI */

struct card {
	struct pci_dev *pci;	/* that it is, or was until it was taken off the bus */
	resource_size_t start;
	void __iomem *bar;
	struct hrtimer stall;
	u8 image[16];		/* the beginning of the image that was streamed last */
	u32 ports, board, ofs;
	u64 interface_h, interface_l;
	u32 pr_ports, pr_err, pr_stuck, pr_deaf, port_deaf, stall_ms, memory_busy;
	u32 stalling, prs, memory_clears, absent;
	u32 functions, numvfs;
};

/* Plays a virtual function of the first card. */
struct function {
	struct pci_dev *pci;
	void __iomem *bar;
};

static struct function functions[FUNCTIONS];
static unsigned int nfunctions;

static struct card cards[MAX_CARDS];
static unsigned int ncards;
static struct dentry *debugfs;

static u64 get(struct card *card, u32 offset)
{
	return readq(card->bar + offset);
}

static void put(struct card *card, u32 offset, u64 value)
{
	writeq(value, card->bar + offset);
}

/* Feature headers: FIUs (4), private features (3), AFUs (1). */
static void header(struct card *card, u32 offset, u64 type, u64 id, u64 next, bool last)
{
	put(card, offset, type << 60 | (u64)last << 40 | next << 16 | id);
}

/* An AFU in a function. Nobody decodes its memory while vfio-pci has it closed. */
static void show_afu(unsigned int number, u64 high, u64 low)
{
	struct function *function = &functions[number];
	u16 command;

	pci_read_config_word(function->pci, PCI_COMMAND, &command);
	pci_write_config_word(function->pci, PCI_COMMAND, command | PCI_COMMAND_MEMORY);
	writeq(1ULL << 60 | 1ULL << 40, function->bar);
	writeq(low, function->bar + 0x8);
	writeq(high, function->bar + 0x10);
	pci_write_config_word(function->pci, PCI_COMMAND, command);
}

/* Where a port's AFU id is, for those who look from outside. */
static void set_afu(struct card *card, u32 port, u64 high, u64 low)
{
	put(card, PORT(port) + AFU + 0x8, low);
	put(card, PORT(port) + AFU + 0x10, high);
	if (card->ofs && nfunctions)
		show_afu(0, high, low);
}

static void fill(struct card *card)
{
	u32 port, i;

	memset_io(card->bar, 0, PORT(MAX_PORTS));

	header(card, 0, 4, 0, THERMAL, false);
	put(card, 0x8, 0x82fe38f0f9e17764ULL);
	put(card, 0x10, 0xbfaf2ae94a5246e3ULL);
	put(card, 0x30, (u64)card->ports << 17 | 1 << 12);
	for (i = 0; i < card->ports; i++)
		put(card, 0x38 + 8 * i, BIT_ULL(60) | PORT(i) | (card->ofs ? 7ULL << 32 : 0));
	put(card, 0x60, 0x0120000177ULL);	/* bitstream id, metadata: any */
	put(card, 0x68, 0x123ULL);

	header(card, THERMAL, 3, 1, POWER - THERMAL, false);
	put(card, THERMAL + 0x8, 90ULL | 95ULL << 8 | 100ULL << 24);
	put(card, THERMAL + 0x10, 41);

	header(card, POWER, 3, 2, EMIF - POWER, false);
	put(card, POWER + 0x8, 23);

	header(card, EMIF, 3, 9, ERRORS - EMIF, false);
	put(card, EMIF + 0x8, EMIF_BANKS);	/* initialised, calibrated, idle */
	put(card, EMIF + 0x10, EMIF_BANKS);

	header(card, ERRORS, 3, 4, PR - ERRORS, false);

	if (card->ofs)	/* the port is in the FME's own list */
		header(card, PR, 3, 5, PORT(0) - PR, false);
	else
		header(card, PR, 3, 5, card->board ? SPI - PR : 0, !card->board);
	if (card->board) {
		header(card, SPI, 3, SPI_ID, 0, true);
		for (i = 0; i < 0x400; i += 4)	/* nothing is plugged in, as the firmware says it */
			put(card, BMC + 2 * i, 0xdeadbeef);
		put(card, BMC + 2 * 0x110, 2 * 61);	/* FPGA core: halves of a degree */
		put(card, BMC + 2 * 0x114, 2 * 95);
		put(card, BMC + 2 * 0x118, 2 * 100);
	}
	put(card, PR_STS, PR_STS_CREDITS);
	put(card, PR + 0xa8, card->interface_l);
	put(card, PR + 0xb0, card->interface_h);

	for (i = 0; i < card->ports; i++) {
		port = PORT(i);
		header(card, port, 4, 1, PORT_ERRORS, false);
		put(card, port + 0x18, card->ofs ? 0 : AFU);
		put(card, port + 0x30, i | 256 << 8);	/* 256 KiB of AFU registers */
		put(card, port + PORT_CTRL, CTRL_RST | CTRL_RSTACK);
		header(card, port + PORT_ERRORS, 3, 0x10, 0, true);
		header(card, port + AFU, 1, 0, 0, true);
		/* What a simulated card holds after power-up too. */
		set_afu(card, i, 0xd8424dc4a4a3c413ULL, 0xf89e433683f9040bULL);
	}
	if (card->ofs && nfunctions > 1)	/* what an image leaves in one that it does not use */
		show_afu(1, 0xd15ab1ed00000000ULL, 0x0110000000000000ULL);
}

static void end_pr(struct card *card, u64 ctrl)
{
	u32 port = (ctrl & PR_CTRL_REGION) >> 7;
	bool meant = card->pr_ports & BIT(port);

	if (card->stalling || (card->pr_stuck && meant))
		return;
	if (card->pr_err && meant) {
		put(card, PR_ERR, card->pr_err);
		put(card, PR_STS, get(card, PR_STS) | PR_STS_FAILED);
		card->pr_err = 0;
	} else {
		set_afu(card, port, get_unaligned_be64(card->image),
			get_unaligned_be64(card->image + 8));
	}
	put(card, PR_CTRL, ctrl & ~(PR_CTRL_START | PR_CTRL_COMPLETE));
}

/* What the card would have done by itself since the driver last looked. */
static void answer(struct card *card)
{
	u64 ctrl = get(card, PR_CTRL);
	u32 i;

	if ((ctrl & CTRL_RST) && !(ctrl & CTRL_RSTACK) && !card->pr_deaf) {
		if (ctrl & PR_CTRL_START)
			card->pr_stuck = 0;	/* it has had its PR */
		put(card, PR_ERR, 0);
		put(card, PR_STS, get(card, PR_STS) & ~PR_STS_FAILED);
		put(card, PR_CTRL, (ctrl & ~(PR_CTRL_START | PR_CTRL_COMPLETE)) | CTRL_RSTACK);
	} else if (!(ctrl & CTRL_RST)) {
		if (ctrl & CTRL_RSTACK)
			put(card, PR_CTRL, ctrl &= ~CTRL_RSTACK);
		if ((ctrl & PR_CTRL_START) && (ctrl & PR_CTRL_COMPLETE))
			end_pr(card, ctrl);
	}

	for (i = 0; i < card->ports; i++) {
		u32 offset = PORT(i) + PORT_CTRL;

		ctrl = get(card, offset);
		if (card->port_deaf & BIT(i))
			continue;
		if ((ctrl & CTRL_RST) && !(ctrl & CTRL_RSTACK))
			put(card, offset, ctrl | CTRL_RSTACK);
		else if (!(ctrl & CTRL_RST) && (ctrl & CTRL_RSTACK))
			put(card, offset, ctrl & ~CTRL_RSTACK);
	}
}

static struct card *card_of(struct device *dev)
{
	unsigned int i;

	for (; dev; dev = dev->parent)
		for (i = 0; i < ncards; i++)
			if (dev == &cards[i].pci->dev)
				return &cards[i];
	return NULL;
}

/* Whoever asks for the time, all cards answer. */
static int on_time(struct kprobe *probe, struct pt_regs *regs)
{
	static DEFINE_RAW_SPINLOCK(lock);
	unsigned long flags;
	unsigned int i;

	raw_spin_lock_irqsave(&lock, flags);
	for (i = 0; i < ncards; i++)
		answer(&cards[i]);
	raw_spin_unlock_irqrestore(&lock, flags);
	return 0;
}

static enum hrtimer_restart stall_over(struct hrtimer *timer)
{
	struct card *card = container_of(timer, struct card, stall);

	WRITE_ONCE(card->stalling, 0);
	return HRTIMER_NORESTART;
}

/* fme_mgr_write(mgr, buf, count): the whole image, padded to whole words.
 *
 * A stall is at the end of a PR, for which the driver waits asleep. Where credits are missing it
 * spins instead, and no other task runs on that processor.
 */
static int on_image(struct kprobe *probe, struct pt_regs *regs)
{
	struct fpga_manager *mgr = (void *)regs_get_kernel_argument(regs, 0);
	const char *image = (void *)regs_get_kernel_argument(regs, 1);
	size_t size = regs_get_kernel_argument(regs, 2);
	struct card *card = card_of(&mgr->dev);

	if (!card)
		return 0;
	card->prs++;
	memset(card->image, 0, sizeof(card->image));
	memcpy(card->image, image, min(size, sizeof(card->image)));
	if (card->stall_ms) {
		WRITE_ONCE(card->stalling, 1);
		hrtimer_start(&card->stall, ms_to_ktime(card->stall_ms), HRTIMER_MODE_REL);
	}
	return 0;
}

/* Attributes that a driver stores: what the register makes of it when the store has succeeded. */
struct store {
	struct device *dev;
};

static int on_store(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	((struct store *)instance->data)->dev = (void *)regs_get_kernel_argument(regs, 0);
	return 0;
}

static struct card *stored(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	if ((long)regs_return_value(regs) <= 0)
		return NULL;
	return card_of(((struct store *)instance->data)->dev);
}

static u32 port_of(struct card *card, struct kretprobe_instance *instance)
{
	struct platform_device *port = to_platform_device(((struct store *)instance->data)->dev);

	return (port->resource[0].start - card->start) & ~(PORT(0) - 1);
}

/* The summary bits of RAS_NONFAT_ERROR go with their causes. */
static void no_longer_nonfatal(struct card *card, u64 bit)
{
	put(card, ERRORS + 0x50, get(card, ERRORS + 0x50) & ~bit);
}

static int port_errors_stored(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct card *card = stored(instance, regs);
	u32 errors;

	if (card) {
		errors = port_of(card, instance) + PORT_ERRORS;
		put(card, errors + 0x10, 0);
		put(card, errors + 0x18, 0);
		no_longer_nonfatal(card, BIT_ULL(3));	/* PortFatalErr */
	}
	return 0;
}

static int pcie0_errors_stored(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct card *card = stored(instance, regs);

	if (card) {
		put(card, ERRORS + 0x20, 0);
		no_longer_nonfatal(card, BIT_ULL(2));	/* PcieError */
	}
	return 0;
}

static int ap1_stored(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct card *card = stored(instance, regs);

	if (card) {
		u32 status = port_of(card, instance) + 0x40;

		put(card, status, get(card, status) & ~BIT_ULL(12));
	}
	return 0;
}

static int ap2_stored(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct card *card = stored(instance, regs);

	if (card) {
		u32 status = port_of(card, instance) + 0x40;

		put(card, status, get(card, status) & ~BIT_ULL(13));
	}
	return 0;
}

/* The control register shares its place with the mask of banks. */
static int memory_cleared(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct card *card = card_of(((struct store *)instance->data)->dev);

	if (card) {
		if ((long)regs_return_value(regs) > 0)
			card->memory_clears++;
		put(card, EMIF + 0x10, EMIF_BANKS);
	}
	return 0;
}

static struct kprobe times = { .symbol_name = "ktime_get", .pre_handler = on_time };
static struct kprobe streams = {
	.symbol_name = "dfl_fme_mgr:fme_mgr_write",
	.pre_handler = on_image,
};

#define STORE(symbol, done) {						\
	.kp.symbol_name = symbol, .entry_handler = on_store,		\
	.handler = done, .data_size = sizeof(struct store),		\
}

static struct kretprobe stores[] = {
	STORE("dfl_afu:errors_store", port_errors_stored),
	STORE("dfl_afu:ap1_event_store", ap1_stored),
	STORE("dfl_afu:ap2_event_store", ap2_stored),
	STORE("dfl_emif:emif_clear_store", memory_cleared),
	STORE("dfl_fme:pcie0_errors_store", pcie0_errors_stored),
};

/* The board's management controller. */
static int bmc_read(void *context, unsigned int reg, unsigned int *value)
{
	struct card *card = context;

	*value = get(card, BMC + 2 * (reg - M10BMC_SYS_BASE));
	return *value == 0xbad ? -ETIMEDOUT : 0;	/* as when the MAX 10 does not answer */
}

static const struct regmap_config bmc_registers = {
	.reg_bits = 32,
	.val_bits = 32,
	.reg_stride = 4,
	.max_register = M10BMC_SYS_END,
	.reg_read = bmc_read,
};

static const struct mfd_cell bmc_cells[] = { { .name = "d5005bmc-hwmon" } };

static int bmc_probe(struct spi_device *spi)
{
	struct intel_m10bmc *bmc = devm_kzalloc(&spi->dev, sizeof(*bmc), GFP_KERNEL);

	if (!bmc)
		return -ENOMEM;
	bmc->dev = &spi->dev;
	bmc->regmap = devm_regmap_init(&spi->dev, NULL, card_of(&spi->dev), &bmc_registers);
	if (IS_ERR(bmc->regmap))
		return PTR_ERR(bmc->regmap);
	spi_set_drvdata(spi, bmc);
	return devm_mfd_add_devices(&spi->dev, PLATFORM_DEVID_AUTO, bmc_cells,
				    ARRAY_SIZE(bmc_cells), NULL, 0, NULL);
}

static const struct spi_device_id bmc_ids[] = { { "m10-d5005" }, { } };

static struct spi_driver bmc_driver = {
	.driver.name = "fake-m10-bmc",
	.probe = bmc_probe,
	.id_table = bmc_ids,
};

static int spi_transfer(struct spi_master *master, struct spi_message *message)
{
	return -EIO;	/* nobody talks over it */
}

static int spi_probe_master(struct dfl_device *device)
{
	struct spi_board_info chip = { .modalias = "m10-d5005", .max_speed_hz = 12500000 };
	struct spi_master *master = devm_spi_alloc_master(&device->dev, 0);
	int failed;

	if (!master)
		return -ENOMEM;
	master->bus_num = -1;
	master->num_chipselect = 1;
	master->transfer_one_message = spi_transfer;
	failed = devm_spi_register_master(&device->dev, master);
	if (failed)
		return failed;
	return spi_new_device(master, &chip) ? 0 : -ENODEV;
}

static const struct dfl_device_id spi_ids[] = { { FME_ID, SPI_ID }, { } };

static struct dfl_driver spi_master_driver = {
	.drv.name = "fake-spi-altera",
	.id_table = spi_ids,
	.probe = spi_probe_master,
};

static ssize_t lay_out(struct file *file, const char __user *from, size_t size, loff_t *position)
{
	struct card *card = file->private_data;
	char text[64] = "";
	u64 high, low;
	u32 ports, board = 0;

	if (size >= sizeof(text))
		return -EINVAL;
	if (copy_from_user(text, from, size))
		return -EFAULT;
	if (sscanf(text, "%u %llx %llx %u", &ports, &high, &low, &board) < 3)
		return -EINVAL;
	if (!ports || ports > MAX_PORTS || (board == 2 && (ports > 1 || card != cards)))
		return -EINVAL;
	if (card->pci->dev.driver)
		return -EBUSY;
	card->ports = ports;
	card->board = board == 1;
	card->ofs = board == 2;
	card->numvfs = hweight32(card->functions);
	card->interface_h = high;
	card->interface_l = low;
	fill(card);
	return size;
}

static const struct file_operations layout_operations = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = lay_out,
};

static ssize_t poke(struct file *file, const char __user *from, size_t size, loff_t *position)
{
	struct card *card = file->private_data;
	char text[64] = "";
	u64 offset, value;

	if (size >= sizeof(text))
		return -EINVAL;
	if (copy_from_user(text, from, size))
		return -EFAULT;
	if (sscanf(text, "%llx %llx", &offset, &value) != 2)
		return -EINVAL;
	if (offset % 8 || offset >= PORT(MAX_PORTS))
		return -EINVAL;
	put(card, offset, value);
	return size;
}

static const struct file_operations poke_operations = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = poke,
};

static int set_memory_busy(void *data, u64 value)
{
	struct card *card = data;

	card->memory_busy = value;
	put(card, EMIF + 0x8, EMIF_BANKS | value << 16);
	return 0;
}

static int get_memory_busy(void *data, u64 *value)
{
	*value = ((struct card *)data)->memory_busy;
	return 0;
}

DEFINE_DEBUGFS_ATTRIBUTE(memory_busy_operations, get_memory_busy, set_memory_busy, "%llu\n");

static int images_show(struct seq_file *file, void *unused)
{
	struct card *card = file->private;
	u32 i;

	for (i = 0; i < card->ports; i++)
		seq_printf(file, "%016llx%016llx\n", get(card, PORT(i) + AFU + 0x10),
			   get(card, PORT(i) + AFU + 0x8));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(images);

static void make_knobs(struct card *card)
{
	struct dentry *dir = debugfs_create_dir(pci_name(card->pci), debugfs);

	debugfs_create_file("layout", 0200, dir, card, &layout_operations);
	debugfs_create_x32("pr_ports", 0600, dir, &card->pr_ports);
	debugfs_create_x32("pr_err", 0600, dir, &card->pr_err);
	debugfs_create_u32("pr_stuck", 0600, dir, &card->pr_stuck);
	debugfs_create_u32("pr_deaf", 0600, dir, &card->pr_deaf);
	debugfs_create_x32("port_deaf", 0600, dir, &card->port_deaf);
	debugfs_create_u32("stall_ms", 0600, dir, &card->stall_ms);
	debugfs_create_x32("functions", 0600, dir, &card->functions);
	debugfs_create_u32("absent", 0600, dir, &card->absent);
	debugfs_create_u32("prs", 0400, dir, &card->prs);
	debugfs_create_u32("memory_clears", 0400, dir, &card->memory_clears);
	debugfs_create_file_unsafe("memory_busy", 0600, dir, card, &memory_busy_operations);
	debugfs_create_file("images", 0400, dir, card, &images_fops);
	debugfs_create_file("poke", 0200, dir, card, &poke_operations);
}

/* Before anybody looks for its driver: the ids of a card. */
static void introduce(struct card *card, struct pci_dev *pci)
{
	bool ofs = card && card->ofs;

	pci->vendor = PCI_VENDOR_ID_INTEL;
	pci->device = ofs ? 0xbcce : 0x09c4;
	pci->subsystem_vendor = PCI_VENDOR_ID_INTEL;
	pci->subsystem_device = ofs ? 0x1771 : 0;
	pci->class = 0x120000;	/* processing accelerator */
}

/* Before its driver looks: a device's memory as BAR 0, wherever that is now. */
static int move_memory(struct pci_dev *pci, resource_size_t least)
{
	struct resource *bar0 = &pci->resource[0], *bar2 = &pci->resource[2], *parent = bar2->parent;

	if (!parent || resource_size(bar2) < least)
		return -ENODEV;
	if (bar0->parent)
		release_resource(bar0);
	release_resource(bar2);
	bar0->start = bar2->start;
	bar0->end = bar2->end;
	bar0->flags = bar2->flags;
	bar2->start = 0;
	bar2->end = 0;
	bar2->flags = 0;
	return request_resource(parent, bar0) ? -EBUSY : 0;
}

static int furnish(struct card *card)
{
	struct resource *bar0 = &card->pci->resource[0];
	int failed = move_memory(card->pci, PORT(MAX_PORTS));

	if (failed)
		return failed;
	if (card->bar && card->start == bar0->start)
		return 0;
	/* A former mapping stays: somebody may be reading there. */
	card->start = bar0->start;
	card->bar = ioremap(bar0->start, resource_size(bar0));
	return card->bar ? 0 : -ENOMEM;
}

static int play_function(struct function *function, struct pci_dev *pci)
{
	int failed = move_memory(pci, PAGE_SIZE);

	if (failed)
		return failed;
	function->pci = pci;
	function->bar = ioremap(pci->resource[0].start, PAGE_SIZE);
	pci->vendor = PCI_VENDOR_ID_INTEL;
	pci->device = 0xbccf;
	pci->subsystem_vendor = PCI_VENDOR_ID_INTEL;
	pci->subsystem_device = 0x138d;	/* in no driver's table */
	pci->class = 0x120000;
	return function->bar ? 0 : -ENOMEM;
}

/* Whose functions they are, as sysfs tells it of virtual ones. */
static void link_functions(struct card *card)
{
	char name[16];
	unsigned int i;

	for (i = 0; i < nfunctions; i++) {
		struct kobject *function = &functions[i].pci->dev.kobj;

		snprintf(name, sizeof(name), "virtfn%u", i);
		sysfs_remove_link(&card->pci->dev.kobj, name);
		sysfs_remove_link(function, "physfn");
		if (!card->ofs || !card->numvfs || !(card->functions & BIT(i)))
			continue;
		if (sysfs_create_link(&card->pci->dev.kobj, function, name) ||
		    sysfs_create_link(function, &card->pci->dev.kobj, "physfn"))
			pr_err("fakedfl: %s cannot be linked\n", name);
	}
}

static ssize_t sriov_totalvfs_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", hweight32(cards->functions));
}
static DEVICE_ATTR_RO(sriov_totalvfs);

static ssize_t sriov_numvfs_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", cards->numvfs);
}

/* As pci-sysfs.c and a driver that makes them with the port in place, which Linux' own does not. */
static ssize_t sriov_numvfs_store(struct device *dev, struct device_attribute *attr,
				  const char *buf, size_t size)
{
	u16 wanted;

	if (kstrtou16(buf, 0, &wanted) < 0)
		return -EINVAL;
	if (wanted > hweight32(cards->functions))
		return -ERANGE;
	if (wanted == cards->numvfs)
		return size;
	if (wanted && wanted != hweight32(cards->functions))
		return -EINVAL;
	if (wanted && cards->numvfs)
		return -EBUSY;
	cards->numvfs = wanted;
	link_functions(cards);
	return size;
}
static DEVICE_ATTR_RW(sriov_numvfs);

static bool probed = true;
static DEVICE_BOOL_ATTR(sriov_drivers_autoprobe, 0644, probed);

static const struct device_attribute *sriov[] = {
	&dev_attr_sriov_totalvfs, &dev_attr_sriov_numvfs, &dev_attr_sriov_drivers_autoprobe.attr,
};

static void show_functions(struct card *card)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(sriov); i++) {
		device_remove_file(&card->pci->dev, sriov[i]);
		if (card->ofs && device_create_file(&card->pci->dev, sriov[i]))
			pr_err("fakedfl: %s cannot be shown\n", sriov[i]->attr.name);
	}
	link_functions(card);
}

/* A card that was taken off the bus is found again. */
static int on_bus(struct notifier_block *block, unsigned long event, void *data)
{
	struct pci_dev *pci = to_pci_dev(data);
	unsigned int i;

	for (i = 0; i < ncards; i++) {
		struct card *card = &cards[i];

		if (card->absent || strcmp(pci_name(card->pci), pci_name(pci)))
			continue;
		if (event == BUS_NOTIFY_ADD_DEVICE) {
			introduce(card, pci);
			set_dev_node(&pci->dev, dev_to_node(&card->pci->dev));
			card->pci = pci_dev_get(pci);
		} else if (event == BUS_NOTIFY_BIND_DRIVER) {
			if (pci->resource[2].parent && furnish(card))
				pr_err("fakedfl: %s cannot be furnished\n", pci_name(pci));
			introduce(card, pci);
			if (card == cards)
				show_functions(card);
		}
	}
	return NOTIFY_DONE;
}

static struct notifier_block bus_notes = { .notifier_call = on_bus };

static int disguise(struct card *card, struct pci_dev *pci)
{
	int failed;

	card->pci = pci;
	failed = furnish(card);
	if (failed)
		return failed;
	introduce(card, pci);
	set_dev_node(&pci->dev, ncards % num_online_nodes());
	hrtimer_init(&card->stall, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
	card->stall.function = stall_over;
	card->ports = 3;
	card->interface_h = 0xce48969398f05f33ULL;
	card->interface_l = 0x946d560708be108aULL;
	card->pr_ports = ~0U;
	card->functions = 3;
	fill(card);
	make_knobs(card);
	return 0;
}

static int __init fakedfl_init(void)
{
	struct pci_dev *pci = NULL;
	unsigned int i, bus;
	int failed;

	debugfs = debugfs_create_dir("fakedfl", NULL);
	/* Host bridges come in any order. */
	for (bus = 0; bus < 256; bus++) {
		while ((pci = pci_get_device(0x1af4, 0x1110, pci))) {
			bool card = ncards < MAX_CARDS;

			if (pci->bus->number != bus || (!card && nfunctions == FUNCTIONS))
				continue;
			failed = card ? disguise(&cards[ncards], pci_dev_get(pci)) :
					play_function(&functions[nfunctions], pci_dev_get(pci));
			if (failed) {
				pr_err("fakedfl: %s: %d\n", pci_name(pci), failed);
				return failed;
			}
			if (card)
				ncards++;
			else
				nfunctions++;
		}
	}

	failed = bus_register_notifier(&pci_bus_type, &bus_notes);
	if (!failed)
		failed = register_kprobe(&times);
	if (!failed)
		failed = register_kprobe(&streams);
	for (i = 0; !failed && i < ARRAY_SIZE(stores); i++)
		failed = register_kretprobe(&stores[i]);
	if (!failed)
		failed = spi_register_driver(&bmc_driver);
	if (!failed)
		failed = dfl_driver_register(&spi_master_driver);
	if (failed)
		pr_err("fakedfl: kprobes and drivers: %d\n", failed);
	/* Without an exit the module stays; the machine is thrown away with it. */
	return failed;
}
module_init(fakedfl_init);

MODULE_DESCRIPTION("FPGA cards played on ivshmem devices");
MODULE_LICENSE("GPL");

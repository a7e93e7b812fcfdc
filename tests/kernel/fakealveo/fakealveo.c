// SPDX-License-Identifier: GPL-2.0
/*
 * Plays Alveo U55C cards to AMD's unmodified drivers, xclmgmt and xocl (XRT 2.25).
 *
 * There is no device underneath. A PCI host bridge in software has a root port for each card, and
 * behind it two functions, 10ee:505c (PF0, management) and 10ee:505d (PF1, user), with 4 KiB of
 * configuration space, 64-bit BARs and the vendor-specific extended capability that the drivers look
 * for. BARs lie in a range of physical addresses where there is nothing, so no memory has to be kept
 * free and the kernel's command line says nothing of it.
 *
 * Registers answer: the drivers use ioread32() and iowrite32(), which are functions on x86. A kprobe on
 * each looks up the physical address behind the pointer and, where it lies in the range, plays the card
 * in the driver's own context and returns to the caller without the access. So nothing depends on who
 * gets the processor when.
 *
 *   PF0, BAR 0				PF1, BAR 0
 *   0x1000 table of the capability	0x1000 the same
 *   0x2000 id of the shell (ROM)	-
 *   0x3000 type of the platform	0x3000
 *   0x4000 mailbox			0x4000 mailbox: what one writes the other reads
 *   0x5000 ICAP (AXI HWICAP)
 *   0x6000 gate of the user partition
 *   0x7000 memory is calibrated
 *
 * Parameters: uuid of the shell (32 digits; the drivers look for its firmware by it), cards, domain and
 * bus of the host bridge, window (where the BARs are), settle_ms (see on_hot_reset), trace.
 *
 * Files of debugfs, fakealveo/, for a test; N is the card's number:
 *
 *   state	of each card a line: the uuid that was streamed to the ICAP last, words of that image,
 *		bursts (grows with whatever is streamed), resets of its bus, whether the gate is open,
 *		packets that PF0 and PF1 wrote to the mailbox
 *   stuckN	1: the ICAP is never done
 *   muteN	1: what PF0 writes to the mailbox is lost
 *   dmaN	1: transfers of memory fail
 *   memoryN	the card's memory, 32 MiB from address 0
 *   userN	PF1's BAR 0, by pread and pwrite of 32-bit registers at their offsets: what a tenant has
 *		who maps it. A mapping cannot be had here: there are no accesses to trap in it
 *
 * Memory: transfers go by XDMA, whose registers libxdma reads by readl(), which is inline and escapes the
 * probes. So libxdma itself is played: probes on its functions (xdma_device_open, xdma_xfer_fastpath and
 * the rest that xocl calls) copy between the driver's pages and the card's memory. xocl's own code above
 * it runs as it is.
 *
 * It cannot play what is not in these lists: compute units, clocks, sensors, firewalls, interrupts, P2P,
 * QDMA and Versal shells. A reset of the bus leaves image and memory in place, which a real card may not.
 */

#include <linux/debugfs.h>
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/kprobes.h>
#include <linux/linkage.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

static unsigned long window = 0x4000000000UL;
module_param(window, ulong, 0444);
static unsigned int ncards = 1;
module_param_named(cards, ncards, uint, 0444);
static unsigned int domain = 1;
module_param(domain, uint, 0444);
static unsigned int bus;	/* the root's number; in domain 0 one that nobody has */
module_param(bus, uint, 0444);
static char *uuid = "00000000000000000000000000000000";
module_param(uuid, charp, 0444);
static unsigned int trace;
module_param(trace, uint, 0644);

#define MAX_CARDS	4
#define BAR_SIZE	(4UL << 20)
#define SIZE		(64UL << 20)	/* of the window */

#define VSEC_TABLE	0x1000
#define ROM		0x2000
#define PLATFORM	0x3000
#define MAILBOX		0x4000
#define ICAP		0x5000
#define GATE		0x6000
#define CALIBRATION	0x7000
#define PAGE_OF(a)	((a) & ~0xfffU)

#define MEMORY_SIZE	(32UL << 20)

struct config {
	u8 now[4096], writable[4096], reset[4096];
};

struct fifo {
	u32 word[16];
	unsigned int level, taken;
};

struct card {
	struct config port, function[2];
	struct fifo from[2];	/* written by function n, read by the other */
	u32 other[2][0x10000 / 4];	/* registers that only keep what was written */
	u32 rom[4], gate, idcode;
	u32 words, first[8];	/* of the image that was streamed to the ICAP last */
	u32 bursts, resets, stuck, dma, mute[2], packets[2];
	u8 *memory;
};

static struct card *cards;
static struct pci_bus *root;
static struct resource memory = { .name = "fake Alveo cards", .flags = IORESOURCE_MEM };
static struct resource numbers = { .name = "fake Alveo buses", .end = 0xff, .flags = IORESOURCE_BUS };
static struct pci_sysdata sysdata = { .node = NUMA_NO_NODE };
static DEFINE_RAW_SPINLOCK(lock);
static struct dentry *debugfs;

/* Configuration space */

static void put16(struct config *c, int at, u16 value, u16 writable)
{
	*(u16 *)(c->now + at) = value;
	*(u16 *)(c->writable + at) = writable;
}

static void put32(struct config *c, int at, u32 value, u32 writable)
{
	*(u32 *)(c->now + at) = value;
	*(u32 *)(c->writable + at) = writable;
}

static void put_pcie(struct config *c, int at, int type)
{
	put16(c, at, 0x0010, 0);
	put16(c, at + 2, 0x0002 | type << 4, 0);
	put32(c, at + 4, 0x8002, 0);			/* 512 bytes */
	put16(c, at + 8, 0x2810, 0xffff);
	put16(c, at + 10, 0, 0);
	put32(c, at + 12, 0x00000103, 0);		/* 16 lanes of 8 GT/s */
	put16(c, at + 16, 0, 0xffff);
	put16(c, at + 18, 0x0103, 0);
	put16(c, at + 40, 0, 0xffff);
}

static void fill_port(struct config *c)
{
	put16(c, 0x00, 0x1b36, 0);
	put16(c, 0x02, 0x000c, 0);
	put16(c, 0x04, 0, 0x0547);
	put16(c, 0x06, 0x0010, 0);
	put32(c, 0x08, 0x06040000, 0);
	put32(c, 0x0c, 0x00010000, 0xff);
	put32(c, 0x18, 0, 0x00ffffff);
	put16(c, 0x1c, 0x00f0, 0xf0f0);
	put32(c, 0x20, 0x0000fff0, 0xfff0fff0);
	put32(c, 0x24, 0x0001fff1, 0xfff0fff0);
	put32(c, 0x28, 0, ~0U);
	put32(c, 0x2c, 0, ~0U);
	put32(c, 0x34, 0x40, 0);
	put16(c, 0x3e, 0, 0x005f);
	put_pcie(c, 0x40, 4);
}

static void fill_function(struct config *c, int number)
{
	put16(c, 0x00, 0x10ee, 0);
	put16(c, 0x02, 0x505c + number, 0);
	put16(c, 0x04, 0, 0x0546);
	put16(c, 0x06, 0x0010, 0);
	put32(c, 0x08, 0x12000000, 0);
	put32(c, 0x0c, 0x00800000, 0xff);
	put32(c, 0x10, 0x0000000c, ~(u32)(BAR_SIZE - 1));
	put32(c, 0x14, 0, ~0U);
	put32(c, 0x18, 0x0000000c, ~0xffffU);
	put32(c, 0x1c, 0, ~0U);
	put16(c, 0x2c, 0x10ee, 0);
	put16(c, 0x2e, 0x000e, 0);
	put32(c, 0x34, 0x70, 0);
	put_pcie(c, 0x70, 0);
	/* Extended: vendor-specific, "additional list of features". */
	put32(c, 0x100, 0x0001000b, 0);
	put32(c, 0x104, 0x01000020, 0);
	put32(c, 0x108, VSEC_TABLE | 0, 0);
	put32(c, 0x10c, 0, 0);
	memcpy(c->reset, c->now, sizeof(c->now));
}

static struct config *config_of(struct pci_bus *on, unsigned int devfn, struct card **behind)
{
	unsigned int i, slot = PCI_SLOT(devfn), function = PCI_FUNC(devfn);

	*behind = NULL;
	if (on->number == bus) {
		if (slot >= ncards || function)
			return NULL;
		*behind = &cards[slot];
		return &cards[slot].port;
	}
	for (i = 0; i < ncards; i++)
		if (cards[i].port.now[0x19] == on->number)
			return slot || function > 1 ? NULL : &cards[i].function[function];
	return NULL;
}

static int config_read(struct pci_bus *on, unsigned int devfn, int at, int size, u32 *value)
{
	struct card *behind;
	struct config *c = config_of(on, devfn, &behind);

	*value = ~0U;
	if (!c)
		return PCIBIOS_DEVICE_NOT_FOUND;
	*value = 0;
	memcpy(value, c->now + at, size);
	return PCIBIOS_SUCCESSFUL;
}

static void empty(struct fifo *fifo)
{
	fifo->level = fifo->taken = 0;
}

/* Of the bus behind the port. */
static void reset(struct card *card)
{
	int i;

	card->resets++;
	for (i = 0; i < 2; i++) {
		memcpy(card->function[i].now, card->function[i].reset, 4096);
		empty(&card->from[i]);
	}
	card->gate = 3;
}

static int config_write(struct pci_bus *on, unsigned int devfn, int at, int size, u32 value)
{
	struct card *behind;
	struct config *c = config_of(on, devfn, &behind);
	u8 before;
	int i;

	if (!c)
		return PCIBIOS_DEVICE_NOT_FOUND;
	before = c->now[0x3e];
	for (i = 0; i < size; i++, value >>= 8)
		c->now[at + i] = (c->now[at + i] & ~c->writable[at + i])
			| (value & c->writable[at + i]);
	if (behind && (c->now[0x3e] & ~before & PCI_BRIDGE_CTL_BUS_RESET))
		reset(behind);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops ops = { .read = config_read, .write = config_write };

/* Registers */

/* Which function decodes this address in its BAR 0. */
static struct card *decode(phys_addr_t address, int *function, u32 *offset)
{
	unsigned int i;
	int n;

	for (i = 0; i < ncards; i++)
		for (n = 0; n < 2; n++) {
			u8 *c = cards[i].function[n].now;
			u64 base = (*(u64 *)(c + 0x10)) & ~0xfULL;

			if (!(c[4] & PCI_COMMAND_MEMORY) || address - base >= BAR_SIZE)
				continue;
			*function = n;
			*offset = address - base;
			return &cards[i];
		}
	return NULL;
}

static u32 mailbox_read(struct card *card, int n, u32 at)
{
	struct fifo *out = &card->from[n], *in = &card->from[!n];
	u32 value;

	switch (at) {
	case 0x08:	/* data */
		if (!in->level)
			return 0;
		value = in->word[in->taken++];
		if (!--in->level)
			in->taken = 0;
		return value;
	case 0x10:	/* empty, full, may send, has received */
		return (u32)!in->level | (out->level == 16) << 1 | (u32)!out->level << 2
			| (in->level == 16 && !in->taken) << 3;
	default:
		return 0;
	}
}

static void mailbox_write(struct card *card, int n, u32 at, u32 value)
{
	struct fifo *out = &card->from[n];

	if (at == 0x00 && out->level < 16) {
		out->word[out->level++] = value;
		if (out->level == 16) {
			card->packets[n]++;
			if (card->mute[n])
				empty(out);
		}
	} else if (at == 0x2c) {
		if (value & 1)
			empty(out);
		if (value & 2)
			empty(&card->from[!n]);
	}
}

static u32 vsec(u32 at, int n)
{
	/* type | revision | BAR << 13 | offset << 16 */
	static const u32 types[2][3] = { { 0x50, 0x52, 0x53 }, { 0x52, 0x53, 0 } };
	static const u32 offsets[2][3] = { { ROM, PLATFORM, MAILBOX }, { PLATFORM, MAILBOX, 0 } };
	int count = n ? 2 : 3, entry;

	switch (at) {
	case 0x0:
		return 1 | 1 << 20;
	case 0x4:
		return 16 + 16 * count;
	case 0x8:
		return 16;
	}
	entry = at / 16 - 1;
	if (entry < 0 || entry >= count)
		return 0;
	switch (at & 0xf) {
	case 0x0:
		return types[n][entry] | offsets[n][entry] << 16;
	case 0x4:
		return offsets[n][entry] >> 16;
	}
	return 0;
}

static u32 answer(struct card *card, int n, u32 offset)
{
	u32 at = offset & 0xfff, stored = offset < 0x10000 ? card->other[n][offset / 4] : 0;

	switch (PAGE_OF(offset)) {
	case VSEC_TABLE:
		return vsec(at, n);
	case PLATFORM:
		return 1;		/* one reprogrammable partition */
	case MAILBOX:
		return mailbox_read(card, n, at);
	}
	if (n)
		return stored;
	switch (PAGE_OF(offset)) {
	case ROM:
		return at < 16 ? card->rom[at / 4] : 0;
	case ICAP:
		switch (at) {
		case 0x104:
			return card->idcode;
		case 0x10c:		/* control: done at once */
			return 0;
		case 0x110:		/* status */
			return card->stuck ? 0 : 5;
		case 0x114:		/* vacancy of the FIFO */
			return 1024;
		case 0x118:
			return 1;
		}
		return 0;
	case GATE:
		return card->gate;
	case CALIBRATION:
		return 1;
	}
	return stored;
}

static bool accept(struct card *card, int n, u32 offset, u32 value)
{
	u32 at = offset & 0xfff;

	if (PAGE_OF(offset) == MAILBOX) {
		mailbox_write(card, n, at, value);
		return true;
	}
	if (n)
		return false;
	switch (PAGE_OF(offset)) {
	case ICAP:
		if (at == 0x100) {
			if (card->words < 8)
				card->first[card->words] = value;
			card->words++;
		} else if (at == 0x10c && value == 1) {
			card->bursts++;
		}
		return true;
	case GATE:
		if (at == 0) {
			if (!value)	/* closed: the next image begins */
				card->words = 0;
			card->gate = value;
		}
		return true;
	}
	return false;
}

/* What a write does; a register that nothing else is made of keeps what was written. */
static void store(struct card *card, int n, u32 offset, u32 value)
{
	if (!accept(card, n, offset, value) && offset < sizeof(card->other[n]))
		card->other[n][offset / 4] = value;
}

asmlinkage void fakealveo_return(void);
asm(".text\n.type fakealveo_return, @function\n.globl fakealveo_return\n"
    "fakealveo_return:\n\t" ASM_RET "\n.size fakealveo_return, .-fakealveo_return\n");

static bool physical(unsigned long address, phys_addr_t *at)
{
	unsigned int level;
	pte_t *pte;

	if (address < VMALLOC_START || address > VMALLOC_END)
		return false;
	pte = lookup_address(address, &level);
	if (!pte || !pte_present(*pte))
		return false;
	if (level == PG_LEVEL_2M)
		*at = ((u64)pmd_pfn(*(pmd_t *)pte) << PAGE_SHIFT) | (address & ~PMD_MASK);
	else if (level == PG_LEVEL_4K)
		*at = ((u64)pte_pfn(*pte) << PAGE_SHIFT) | (address & ~PAGE_MASK);
	else
		return false;
	return *at >= memory.start && *at <= memory.end;
}

static int return_at_once(struct pt_regs *regs, unsigned long value)
{
	regs->ax = value;
	regs->ip = (unsigned long)fakealveo_return;
	return 1;
}

static int on_read(struct kprobe *probe, struct pt_regs *regs)
{
	unsigned long flags, address = regs->di;
	phys_addr_t at;
	struct card *card;
	u32 offset = 0, value = ~0U;
	int n = 0;

	if (!physical(address, &at))
		return 0;
	raw_spin_lock_irqsave(&lock, flags);
	card = decode(at, &n, &offset);
	if (card)
		value = answer(card, n, offset);
	raw_spin_unlock_irqrestore(&lock, flags);
	if (trace && PAGE_OF(offset) != MAILBOX)
		pr_info("PF%d %s %x -> %x\n", n, card ? "read" : "NOBODY", offset, value);
	return return_at_once(regs, value);
}

static int on_write(struct kprobe *probe, struct pt_regs *regs)
{
	unsigned long flags, address = regs->si;
	u32 offset = 0, value = regs->di;
	phys_addr_t at;
	struct card *card;
	int n = 0;

	if (!physical(address, &at))
		return 0;
	raw_spin_lock_irqsave(&lock, flags);
	card = decode(at, &n, &offset);
	if (card)
		store(card, n, offset, value);
	raw_spin_unlock_irqrestore(&lock, flags);
	if (trace && PAGE_OF(offset) != MAILBOX && PAGE_OF(offset) != ICAP)
		pr_info("PF%d %s %x <- %x\n", n, card ? "write" : "NOBODY", offset, value);
	regs->ip = (unsigned long)fakealveo_return;
	return 1;
}

/* There to keep the probe from being turned into a jump, which could not return to the caller. */
static void after(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

static struct kprobe reads = {
	.symbol_name = "ioread32", .pre_handler = on_read, .post_handler = after,
};
static struct kprobe writes = {
	.symbol_name = "iowrite32", .pre_handler = on_write, .post_handler = after,
};

/*
 * xclmgmt answers PF1's request for a reset and resets the card at once. Whether the answer leaves before
 * the mailbox is torn down is a race; where it is lost, xocl waits 20 s. The card waits a moment, unless a
 * test asks for the race by settle_ms=0.
 */
static unsigned int settle_ms = 30;
module_param(settle_ms, uint, 0644);

static int on_hot_reset(struct kprobe *probe, struct pt_regs *regs)
{
	mdelay(min(settle_ms, 200U));
	return 0;
}

static struct kprobe hot_resets = {
	.symbol_name = "xclmgmt:xclmgmt_hot_reset", .pre_handler = on_hot_reset,
};
static bool hot_resets_probed;

/*
 * libxdma, which is a part of xocl. A handle is the card itself; each function returns to its caller at once.
 */

/* void *xdma_device_open(name, pdev, int *interrupts, int *to card, int *from card, no_dma) */
static int on_dma_open(struct kprobe *probe, struct pt_regs *regs)
{
	struct pci_dev *pdev = (void *)regs->si;
	unsigned int i;

	for (i = 0; i < ncards; i++)
		if (cards[i].port.now[0x19] == pdev->bus->number) {
			*(int *)regs->dx = 16;
			*(int *)regs->cx = 1;
			*(int *)regs->r8 = 1;
			return return_at_once(regs, (unsigned long)&cards[i]);
		}
	return return_at_once(regs, 0);
}

/* ssize_t xdma_xfer_fastpath(handle, channel, bool to card, u64 address, struct sg_table *, mapped, ms) */
static int on_dma_transfer(struct kprobe *probe, struct pt_regs *regs)
{
	struct card *card = (void *)regs->di;
	bool to_card = regs->dx & 1;
	u64 at = regs->cx, done = 0;
	struct sg_table *table = (void *)regs->r8;
	struct scatterlist *one;
	unsigned int i;

	if (card->dma)
		return return_at_once(regs, -EIO);
	for_each_sg(table->sgl, one, table->orig_nents, i) {
		u8 *ours = card->memory + at + done, *theirs = sg_virt(one);

		if (at + done > MEMORY_SIZE || one->length > MEMORY_SIZE - at - done)
			return return_at_once(regs, -EIO);
		if (to_card)
			memcpy(ours, theirs, one->length);
		else
			memcpy(theirs, ours, one->length);
		done += one->length;
	}
	return return_at_once(regs, done);
}

static int on_dma_rest(struct kprobe *probe, struct pt_regs *regs)
{
	return return_at_once(regs, 0);
}

static struct kprobe dma[] = {
	{ .symbol_name = "xocl:xdma_device_open", .pre_handler = on_dma_open },
	{ .symbol_name = "xocl:xdma_xfer_fastpath", .pre_handler = on_dma_transfer },
	{ .symbol_name = "xocl:xdma_device_close", .pre_handler = on_dma_rest },
	{ .symbol_name = "xocl:xdma_device_online", .pre_handler = on_dma_rest },
	{ .symbol_name = "xocl:xdma_device_offline", .pre_handler = on_dma_rest },
	{ .symbol_name = "xocl:xdma_user_isr_register", .pre_handler = on_dma_rest },
	{ .symbol_name = "xocl:xdma_user_isr_enable", .pre_handler = on_dma_rest },
	{ .symbol_name = "xocl:xdma_user_isr_disable", .pre_handler = on_dma_rest },
};
static unsigned int dma_probed;

static void probe_dma(void)
{
	for (dma_probed = 0; dma_probed < ARRAY_SIZE(dma); dma_probed++) {
		struct kprobe *probe = &dma[dma_probed];
		int failed;

		probe->addr = NULL;
		probe->flags = 0;
		probe->post_handler = after;
		failed = register_kprobe(probe);
		if (failed) {
			pr_warn("no probe on %s: %d\n", probe->symbol_name, failed);
			return;
		}
	}
}

static void unprobe_dma(void)
{
	while (dma_probed)
		unregister_kprobe(&dma[--dma_probed]);
}

static int on_module(struct notifier_block *block, unsigned long what, void *which)
{
	const char *name = ((struct module *)which)->name;

	if (!strcmp(name, "xocl")) {
		if (what == MODULE_STATE_COMING)	/* it finds cards as soon as it is live */
			probe_dma();
		else if (what == MODULE_STATE_GOING)
			unprobe_dma();
		return NOTIFY_DONE;
	}
	if (strcmp(name, "xclmgmt"))
		return NOTIFY_DONE;
	if (what == MODULE_STATE_LIVE && !hot_resets_probed) {
		hot_resets.addr = NULL;
		hot_resets.flags = 0;
		hot_resets_probed = !register_kprobe(&hot_resets);
		if (!hot_resets_probed)
			pr_warn("no probe on xclmgmt_hot_reset\n");
	} else if (what == MODULE_STATE_GOING && hot_resets_probed) {
		unregister_kprobe(&hot_resets);
		hot_resets_probed = false;
	}
	return NOTIFY_DONE;
}

static struct notifier_block modules = { .notifier_call = on_module };

static int state_show(struct seq_file *s, void *unused)
{
	unsigned int i;

	for (i = 0; i < ncards; i++) {
		struct card *c = &cards[i];
		const u32 *id = c->first + 1;	/* after the sync word */

		seq_printf(s, "image=%08x%08x%08x%08x words=%u bursts=%u resets=%u gate=%u pf0=%u pf1=%u\n",
			   id[0], id[1], id[2], id[3], c->words, c->bursts, c->resets, c->gate,
			   c->packets[0], c->packets[1]);
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(state);

/* One register of PF1, as user space has it that maps the BAR. */

static ssize_t user_read(struct file *file, char __user *to, size_t size, loff_t *at)
{
	struct card *card = file->private_data;
	unsigned long flags;
	u32 value;

	if (size != sizeof(value) || *at < 0 || *at >= BAR_SIZE || *at % sizeof(value))
		return -EINVAL;
	raw_spin_lock_irqsave(&lock, flags);
	value = answer(card, 1, *at);
	raw_spin_unlock_irqrestore(&lock, flags);
	return copy_to_user(to, &value, sizeof(value)) ? -EFAULT : sizeof(value);
}

static ssize_t user_write(struct file *file, const char __user *from, size_t size, loff_t *at)
{
	struct card *card = file->private_data;
	unsigned long flags;
	u32 value;

	if (size != sizeof(value) || *at < 0 || *at >= BAR_SIZE || *at % sizeof(value))
		return -EINVAL;
	if (copy_from_user(&value, from, sizeof(value)))
		return -EFAULT;
	raw_spin_lock_irqsave(&lock, flags);
	store(card, 1, *at, value);
	raw_spin_unlock_irqrestore(&lock, flags);
	return sizeof(value);
}

static const struct file_operations user_fops = {
	.owner = THIS_MODULE, .open = simple_open, .read = user_read, .write = user_write,
};

/* The card's memory, as no tenant has it. */

static ssize_t memory_read(struct file *file, char __user *to, size_t size, loff_t *at)
{
	struct card *card = file->private_data;

	return simple_read_from_buffer(to, size, at, card->memory, MEMORY_SIZE);
}

static ssize_t memory_write(struct file *file, const char __user *from, size_t size, loff_t *at)
{
	struct card *card = file->private_data;

	return simple_write_to_buffer(card->memory, MEMORY_SIZE, at, from, size);
}

static const struct file_operations memory_fops = {
	.owner = THIS_MODULE, .open = simple_open, .read = memory_read, .write = memory_write,
	.llseek = default_llseek,
};

static void free_cards(void)
{
	unsigned int i;

	for (i = 0; i < ncards; i++)
		vfree(cards[i].memory);
	kvfree(cards);
}

static int __init fakealveo_init(void)
{
	LIST_HEAD(resources);
	unsigned int i, k;
	int failed;

	if (ncards > MAX_CARDS || strlen(uuid) != 32)
		return -EINVAL;
	cards = kvcalloc(ncards, sizeof(*cards), GFP_KERNEL);
	if (!cards)
		return -ENOMEM;
	memory.start = window;
	memory.end = window + SIZE - 1;
	memory.flags |= window >> 32 ? IORESOURCE_MEM_64 | IORESOURCE_PREFETCH : 0;
	failed = insert_resource(&iomem_resource, &memory);
	if (failed)
		goto no_memory;
	for (i = 0; i < ncards; i++) {
		fill_port(&cards[i].port);
		fill_function(&cards[i].function[0], 0);
		fill_function(&cards[i].function[1], 1);
		cards[i].gate = 3;
		cards[i].idcode = 0x14b79093;
		cards[i].memory = vzalloc(MEMORY_SIZE);
		if (!cards[i].memory) {
			failed = -ENOMEM;
			goto no_probe;
		}
		for (k = 0; k < 4; k++) {	/* the first digits are in the last word */
			char word[9];

			memcpy(word, uuid + 8 * k, 8);
			word[8] = 0;
			failed = kstrtou32(word, 16, &cards[i].rom[3 - k]);
			if (failed)
				goto no_probe;
		}
	}
	failed = register_kprobe(&reads);
	if (failed)
		goto no_probe;
	failed = register_kprobe(&writes);
	if (failed)
		goto no_write;
	sysdata.domain = domain;
	pci_add_resource(&resources, &memory);
	pci_add_resource(&resources, &numbers);
	numbers.start = bus;
	root = pci_create_root_bus(NULL, bus, &ops, &sysdata, &resources);
	if (!root) {
		pci_free_resource_list(&resources);
		failed = -ENODEV;
		goto no_root;
	}
	pci_scan_child_bus(root);
	pci_assign_unassigned_bus_resources(root);
	debugfs = debugfs_create_dir("fakealveo", NULL);
	debugfs_create_file("state", 0444, debugfs, NULL, &state_fops);
	for (i = 0; i < ncards; i++) {
		char name[16];

		snprintf(name, sizeof(name), "stuck%u", i);
		debugfs_create_u32(name, 0644, debugfs, &cards[i].stuck);
		snprintf(name, sizeof(name), "mute%u", i);
		debugfs_create_u32(name, 0644, debugfs, &cards[i].mute[0]);
		snprintf(name, sizeof(name), "dma%u", i);
		debugfs_create_u32(name, 0644, debugfs, &cards[i].dma);
		snprintf(name, sizeof(name), "memory%u", i);
		debugfs_create_file(name, 0600, debugfs, &cards[i], &memory_fops);
		snprintf(name, sizeof(name), "user%u", i);
		debugfs_create_file(name, 0600, debugfs, &cards[i], &user_fops);
	}
	register_module_notifier(&modules);
	pci_bus_add_devices(root);
	return 0;

no_root:
	unregister_kprobe(&writes);
no_write:
	unregister_kprobe(&reads);
no_probe:
	release_resource(&memory);
no_memory:
	free_cards();
	return failed;
}

static void __exit fakealveo_exit(void)
{
	unregister_module_notifier(&modules);
	if (hot_resets_probed)
		unregister_kprobe(&hot_resets);
	unprobe_dma();
	pci_lock_rescan_remove();
	pci_stop_root_bus(root);
	pci_remove_root_bus(root);
	pci_unlock_rescan_remove();
	debugfs_remove(debugfs);
	unregister_kprobe(&writes);
	unregister_kprobe(&reads);
	release_resource(&memory);
	free_cards();
}

module_init(fakealveo_init);
module_exit(fakealveo_exit);
MODULE_DESCRIPTION("Plays Alveo cards to AMD's xclmgmt and xocl");
MODULE_LICENSE("GPL");

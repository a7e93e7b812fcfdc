/* Dynamic Resource Allocation: scheduler, kubelet, plugin and cards; docs/model/README.md says what it is and is not.
 *
 * As in protocol.pml a step ends where the plugin's code awaits, and names are the code's. The work on a card
 * (cards/prepare.py, cards/scrub.py) is as there, but for what the other door alone has. Here the owner of a device
 * is a claim with one or two pods, the second of which comes without a call.
 *
 * Size:    CLAIMS (1 to 3), CARDS (1 or 2, of two regions each; NR + n is card n as a whole)
 * Budgets: CRASHES, RESTARTS (of kubelet), WIPES (its record is lost with it), FORCED, LOST (answers), JOINS (second
 *          pods), AGAIN (new pods of a claim that nobody used any more, claims that are allocated anew)
 * Claims:  BLANK_CLAIM asks for no bitstream (0: each asks for one)
 * Traces:  TRACE prints each step and state; PATIENT makes random ones get further
 * Bugs:    BUG_..., each a mistake that the checker has to find
 */

#ifndef CLAIMS
#define CLAIMS 2
#endif
#ifndef CARDS
#define CARDS 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef RESTARTS
#define RESTARTS 1
#endif
#ifndef WIPES
#define WIPES 1
#endif
#ifndef FORCED
#define FORCED 1
#endif
#ifndef LOST
#define LOST 1
#endif
#ifndef JOINS
#define JOINS 1
#endif
#ifndef AGAIN
#define AGAIN 1
#endif
#ifndef BLANK_CLAIM
#define BLANK_CLAIM 2
#endif

#define NR (2 * CARDS)
#define CARD(d)  ((d) < NR -> (d) / 2 : (d) - NR)
#define FIRST(d) ((d) < NR -> (d) : 2 * ((d) - NR))
#define LAST(d)  ((d) < NR -> (d) : 2 * ((d) - NR) + 1)
#define COVERS(d, r) (FIRST(d) <= (r) && (r) <= LAST(d))
#define OVERLAP(d, e) (FIRST(d) <= LAST(e) && FIRST(e) <= LAST(d))
#define SET_OF(d) ((d) < NR -> 1 << (d) : 3 << (2 * ((d) - NR)))
#define BIT(p)   (1 << ((p) - 1))
#define WANT(p)  ((p) == BLANK_CLAIM -> 0 : (p))
/* Pods: two bits of each claim. */
#define BOTH(p)  (3 << (2 * ((p) - 1)))
#define POD(p, n) ((n) << (2 * ((p) - 1)))

/* Conditions; FAULTED and UNBLANKED are left out. */
#define DIRTY 0
#define SCRUBBING 1
#define BLANK 2
#define PROGRAMMED 3

/* A claim at the API server: the scheduler gives away what is not allocated. */
#define ALLOCATED 1
#define FREED 2
/* Kubelet's call for it. */
#define PREPARE_CALL 1
#define UNPREPARE_CALL 2
/* It in the ledger. */
#define TAKEN 1
#define PREPARED 2
#define ENDED 3
/* Its preparation (ClaimLife._run): asks the API server, tries, wants the card, works, looks once more. */
#define READS 1
#define TRIES 2
#define QUEUED 3
#define WORKED 4
#define LOOKS 5

/* What a card is worked on for, and what its next thread's end is. */
#define NOBODY 0
#define PREPARE 1
#define SCRUB 2
#define PAY 3
#define LOOK 1
#define OPEN 2
#define LOAD 3
#define WIPE 4
#define CLEAR 5
#define BRING 6
#define CLOSE 7

typedef Claim {
  unsigned api : 2; unsigned dev : 3;                     /* the scheduler's */
  bit rec; bit ready; unsigned call : 2;                  /* kubelet's */
  unsigned st : 2; unsigned has : 3; bit used; bit file;  /* the plugin's */
  unsigned work : 3; unsigned read : 3; bit joined
};
typedef Region {
  unsigned cond : 2; byte former; bit left;                          /* what the ledger knows */
  unsigned image : 2; unsigned data : 3; byte att; bit held          /* what is */
};
typedef Work {
  unsigned kind : 2; unsigned pc : 3; unsigned owner : 2; bit lease;
  unsigned r : 2; unsigned todo : 4; unsigned done : 4; bit failed
};

Claim claim[CLAIMS + 1];
Region region[NR];
Work work[CARDS];
bit debt[CARDS];
byte memory[CARDS];
byte pods;    /* that kubelet has */
byte runs;    /* whose containers run */
byte known;   /* tenancies of claims that the plugin has, which kubelet has not taken back (not `left`) */
byte had;     /* of these and of those that it has, whose containers may have run (Tenancy.used) */
bit synced;
unsigned crashes : 2, restarts : 2, wipes : 2, forced : 2, lost : 2, joins : 2, again : 2;

hidden byte i, j, k, add, was, ok, mine;

#define HAS(p)      (claim[p].st == TAKEN || claim[p].st == PREPARED)
#define HAS_IT(p, r) (HAS(p) && COVERS(claim[p].has, r))
#if CLAIMS == 1
#define OWNER(r) (HAS_IT(1, r) -> 1 : 0)
#elif CLAIMS == 2
#define OWNER(r) (HAS_IT(1, r) -> 1 : (HAS_IT(2, r) -> 2 : 0))
#else
#define OWNER(r) (HAS_IT(1, r) -> 1 : (HAS_IT(2, r) -> 2 : (HAS_IT(3, r) -> 3 : 0)))
#endif
#define OWNED(r)    (OWNER(r) != 0)
/* No PostStop comes by this door: the counts of a claim that was used never balance. */
#define IS_DUE(r)   (region[r].cond == DIRTY && (!OWNED(r) || !claim[OWNER(r)].used))
#define LEFT_ON(r)  (region[r].cond != BLANK && !OWNED(r))
/* Regions of an ended claim that a scrub is still to come for (ClaimLife._left) */
#define LEFT(p)     (claim[p].st == ENDED && (LEFT_ON(FIRST(claim[p].has)) || LEFT_ON(LAST(claim[p].has))))

/* ------------------------------------------------------------------ what always holds */

#ifdef TRACE
#define TOLD(name, x, y) printf("STEP "); printf(#name); printf(" %d %d", x, y); tell(); always()
inline tell()
{
  for (i : 1 .. CLAIMS) {
    printf(" C%d%d%d%d%d%d", claim[i].st, (claim[i].st -> claim[i].has : 0), claim[i].used,
           (known >> (2 * (i - 1))) & 3, (had >> (2 * (i - 1))) & 3, claim[i].file && claim[i].st == PREPARED)
  }
  for (i : 0 .. NR - 1) {
    printf(" R%d-%d-%d%d%d", region[i].cond, region[i].former, region[i].image, region[i].data,
           region[i].held)
  }
  for (i : 0 .. CARDS - 1) {
    printf(" D%d%d W%d%d", debt[i], memory[i], work[i].kind, work[i].pc)
  }
  printf("\n")
}
#else
#define TOLD(name, x, y) always()
#endif

inline always()
{
  for (i : 0 .. NR - 1) {
    /* 4: what is offered is clean, and nobody is on it */
    assert(OWNED(i) || region[i].cond != BLANK ||
           (region[i].image == 0 && region[i].data == 0 && region[i].att == 0))
  }
  for (i : 0 .. CARDS - 1) {
    assert(OWNED(2 * i) || OWNED(2 * i + 1) || debt[i] ||
           region[2 * i].cond != BLANK || region[2 * i + 1].cond != BLANK || memory[i] == 0)
  }
  for (i : 1 .. CLAIMS) {
    /* 3: what kubelet takes for prepared is, and 6: no call of another ends it */
    assert(!claim[i].ready || claim[i].st == PREPARED);
    for (j : i + 1 .. CLAIMS) {
      /* 1: the ledger and kubelet have one owner for each region; a card excludes its regions */
      assert(!HAS(i) || !HAS(j) || !OVERLAP(claim[i].has, claim[j].has))
    }
  }
  i = 0; j = 0; k = 0; add = 0; was = 0; ok = 0; mine = 0
}

/* ------------------------------------------------------------------ ledger */

inline set_cond(r, c) { region[r].cond = c }

/* Who is, or may be, there (CardOperations.living): whoever kubelet has not taken back counts, whether it runs or not. */
#define BUSY(p) (had & BOTH(p) & (known | runs))

#ifdef BUG_PARTED
#define IN_USE(p) (had & BOTH(p))
#else
#define IN_USE(p) claim[p].used  /* pods that used it may be forgotten by now */
#endif

/* The end of what a claim has (Claims._release) */
inline release(p)
{
  add = had & BOTH(p);
#ifdef BUG_UNASKED
  add = 0;
#endif
  for (k : FIRST(claim[p].has) .. LAST(claim[p].has)) {
    if
    :: region[k].cond != SCRUBBING && !(!IN_USE(p) && region[k].cond == BLANK) -> set_cond(k, DIRTY)
    :: else
    fi;
    if
    :: (region[k].former | add) != region[k].former ->
      region[k].former = region[k].former | add;
      if
      :: region[k].cond == SCRUBBING -> region[k].left = 1
      :: else
      fi
    :: else
    fi
  }
  claim[p].used = 0;
  had = had & (255 - BOTH(p));
  was = CARD(claim[p].has);
  if
  :: work[was].kind == PREPARE && work[was].owner == p -> work[was].lease = 0
  :: else
  fi
}

/* Holders.take: all of it or nothing; `ok` says whether. */
inline take(p)
{
  ok = 1;
  for (k : 1 .. CLAIMS) {
    if
    :: k != p && HAS(k) && OVERLAP(claim[k].has, claim[p].read) -> ok = 0
    :: else
    fi
  }
#ifdef BUG_HELD
  for (k : 1 .. CLAIMS) {  /* what is deallocated counts as ended */
    if
    :: !ok && k != p && HAS(k) && claim[k].api == FREED && OVERLAP(claim[k].has, claim[p].read) ->
      claim[k].st = ENDED; claim[k].ready = 0; ok = 1
    :: else
    fi
  }
#endif
  if
  :: ok ->
    mine = known & BOTH(p);
    if
    :: HAS(p) -> release(p)
    :: !HAS(p) -> mine = 0
    fi;
    claim[p].st = TAKEN;
    claim[p].has = claim[p].read;
    known = (known & (255 - BOTH(p))) | mine | (pods & BOTH(p));
#ifdef BUG_EARLY
    claim[p].st = PREPARED; claim[p].used = 1;
#endif
    claim[p].work = QUEUED;
    ok = 1
  :: else
  fi
}

/* ClaimLife.end: the holder stays until its regions are clean. */
inline end_claim(p)
{
  claim[p].work = 0;
  claim[p].read = 0;
  if
  :: HAS(p) -> release(p); claim[p].st = ENDED; known = known & (255 - BOTH(p))
  :: else
  fi;
  claim[p].file = 0;
  if
  :: claim[p].call == PREPARE_CALL -> claim[p].call = 0
  :: else
  fi
}

inline forget(p) { claim[p].st = 0; claim[p].has = 0 }

/* ------------------------------------------------------------------ what really happens */

inline attach(p, n)
{
  for (k : FIRST(claim[p].has) .. LAST(claim[p].has)) {
    /* 2: nothing of another claim is there, and exactly what this one asks for */
    assert((region[k].data & (7 - BIT(p))) == 0);
    assert((region[k].att & (255 - BOTH(p))) == 0);
    assert(region[k].image == WANT(p) && !region[k].held);
    assert(claim[p].has < NR || (memory[k / 2] & (7 - BIT(p))) == 0);
    region[k].att = region[k].att | POD(p, n);
    region[k].data = region[k].data | BIT(p);
    memory[k / 2] = memory[k / 2] | BIT(p)
  }
}

inline stop(p, n)
{
  runs = runs & (255 - POD(p, n));
  for (k : 0 .. NR - 1) { region[k].att = region[k].att & (255 - POD(p, n)) }
}

/* 7: nobody is on a region that is reset or programmed */
inline wipe(r) { assert(region[r].att == 0); region[r].image = 0; region[r].data = 0 }

/* 7: nor on the card whose memory is cleared, and no neighbour has something in it */
inline clear(c)
{
  for (k : 2 * c .. 2 * c + 1) {
    assert(region[k].att == 0);
    assert(!OWNED(k) || region[k].held || work[c].kind == PAY || !claim[OWNER(k)].used)
  }
  memory[c] = 0
}

/* ------------------------------------------------------------------ work on a card */

inline may_clear(c, set)
{
  ok = 1;
  for (k : 2 * c .. 2 * c + 1) {
    if
    :: !((set) & (1 << k)) && (OWNED(k) || (region[k].former & runs)) -> ok = 0
    :: else
    fi
  }
#ifdef BUG_NEIGHBOUR
  ok = 1
#endif
}

inline pay_debt(c, set)
{
  ok = 1;
  for (k : 2 * c .. 2 * c + 1) {
    if
    :: !((set) & (1 << k)) && region[k].cond != BLANK -> ok = 0
    :: else
    fi
  }
  if
  :: ok -> debt[c] = 0
  :: else
  fi
}

/* Nothing stays SCRUBBING that nobody works on (CardOperations.settle). */
inline settle(set)
{
  for (k : 0 .. NR - 1) {
    if
    :: ((set) & (1 << k)) && region[k].cond == SCRUBBING -> set_cond(k, DIRTY); region[k].left = 0
    :: else
    fi
  }
}

inline begin_work_on(r)
{
  if
  :: region[r].cond != SCRUBBING -> region[r].left = 0
  :: else
  fi;
  set_cond(r, SCRUBBING)
}

inline idle(c)
{
  work[c].kind = NOBODY; work[c].pc = 0; work[c].owner = 0; work[c].lease = 0;
  work[c].r = 0; work[c].todo = 0; work[c].done = 0; work[c].failed = 0
}

#ifdef BUG_LEASE
#define HOLDS(c) true
#else
#define HOLDS(c) work[c].lease
#endif
#define DEVICE(c) claim[work[c].owner].has

inline give_up(c)
{
  work[c].failed = 1;
  work[c].todo = 0;
  settle(work[c].done);
  work[c].pc = CLOSE
}

/* The end of a preparation. What may pass is tried again, what ended is not. */
inline finish(c)
{
  was = work[c].owner;
  if
  :: work[c].lease && claim[was].work == WORKED ->
    claim[was].work = (work[c].failed -> TRIES : LOOKS)
  :: else
  fi;
  idle(c)
}

/* Conditions.clean of a region that was worked on; sets `failed` where something came between. */
inline clean(r)
{
  if
  :: region[r].cond == SCRUBBING && !region[r].left -> region[r].former = 0; set_cond(r, BLANK)
  :: else -> work[r / 2].failed = 1
  fi
}

/* From clean to what the claim asks for (Preparer._bring), region by region. */
inline bring_next(c)
{
  ok = 0;
  for (k : 2 * c .. 2 * c + 1) {
    if
    :: !ok && !work[c].failed && (work[c].todo & (1 << k)) ->
      if
      :: !HOLDS(c) -> work[c].failed = 1
      :: HOLDS(c) && WANT(work[c].owner) != 0 -> begin_work_on(k); work[c].r = k; ok = 1
      :: HOLDS(c) && WANT(work[c].owner) == 0 && region[k].cond == BLANK -> work[c].r = k; ok = 1
      :: HOLDS(c) && WANT(work[c].owner) == 0 && region[k].cond != BLANK ->
        clean(k);
        work[c].todo = work[c].todo & (15 - (1 << k))
      fi
    :: else
    fi
  }
  if
  :: work[c].failed -> give_up(c)
  :: !work[c].failed && ok -> work[c].pc = BRING
  :: else -> work[c].todo = 0; work[c].r = 0; work[c].pc = CLOSE
  fi
}

inline after_wipes(c)
{
  if
  :: !HOLDS(c) -> give_up(c)
  :: else ->
    may_clear(c, work[c].done);
    work[c].r = 0;
    if
    :: ok -> work[c].pc = CLEAR
    :: else -> work[c].todo = work[c].done; bring_next(c)
    fi
  fi
}

inline prepare_begins(c, p)
{
  claim[p].work = WORKED;
  work[c].kind = PREPARE; work[c].owner = p; work[c].lease = 1;
  work[c].done = SET_OF(claim[p].has);  /* its regions, whatever the claim has later */
  add = 0;
  for (k : FIRST(claim[p].has) .. LAST(claim[p].has)) { add = add | region[k].former }
  work[c].pc = (add -> LOOK : OPEN)
}

inline prepare_goes_on(c)
{
  mine = work[c].done;
  if
  :: work[c].pc == LOOK ->
    add = 0;
    for (k : 2 * c .. 2 * c + 1) {
      if
      :: mine & (1 << k) -> add = add | region[k].former
      :: else
      fi
    }
    if
    :: (add & runs) || !HOLDS(c) -> work[c].failed = 1; finish(c)
    :: else -> work[c].pc = OPEN
    fi
  :: work[c].pc == OPEN ->  /* no container has its node open yet: nothing protects but what is known */
    for (k : 2 * c .. 2 * c + 1) {
      if
      :: mine & (1 << k) ->
        region[k].held = 1;
        if
        :: region[k].cond == DIRTY || region[k].cond == SCRUBBING ||
           (WANT(work[c].owner) == 0 && region[k].cond == PROGRAMMED) ->
          work[c].todo = work[c].todo | (1 << k)
        :: else
        fi
      :: else
      fi
    }
    if
    :: work[c].todo -> work[c].pc = LOAD
    :: !work[c].todo && mine == (3 << (2 * c)) && debt[c] && HOLDS(c) ->
      may_clear(c, mine);
      if
      :: ok -> work[c].pc = CLEAR
      :: else -> work[c].todo = mine; bring_next(c)
      fi
    :: else -> work[c].todo = mine; bring_next(c)
    fi
  :: work[c].pc == LOAD ->
    if
    :: !HOLDS(c) -> give_up(c)
    :: else ->
      debt[c] = 1;
      ok = 0;
      for (k : 2 * c .. 2 * c + 1) {
        if
        :: work[c].todo & (1 << k) ->
          begin_work_on(k);
          if
          :: !ok -> work[c].r = k; ok = 1
          :: else
          fi
        :: else
        fi
      }
      work[c].pc = WIPE
    fi
  :: work[c].pc == WIPE ->
    j = work[c].r;
    wipe(j);
    work[c].todo = work[c].todo & (15 - (1 << work[c].r));
    if
    :: work[c].todo && HOLDS(c) -> work[c].r = 2 * c + 1
    :: work[c].todo && !HOLDS(c) -> give_up(c)
    :: else -> after_wipes(c)
    fi
  :: work[c].pc == CLEAR ->
    clear(c);
    pay_debt(c, mine);
    work[c].todo = mine;
    bring_next(c)
  :: work[c].pc == BRING ->
    j = work[c].r;
    if
    :: WANT(work[c].owner) == 0 ->  /* verified: it still reads as blank */
      assert(region[j].image == 0);
      if
      :: region[j].cond == BLANK
      :: else -> work[c].failed = 1
      fi
    :: else ->
      assert(region[j].att == 0 && (region[j].data & (7 - BIT(work[c].owner))) == 0);
      region[j].image = work[c].owner;
      if
      :: region[j].cond == SCRUBBING && !region[j].left && HOLDS(c) ->
        region[j].former = 0;
        set_cond(j, PROGRAMMED)
      :: else -> work[c].failed = 1
      fi
    fi;
    work[c].todo = work[c].todo & (15 - (1 << j));
    bring_next(c)
  :: work[c].pc == CLOSE ->
    for (k : 2 * c .. 2 * c + 1) {
      if
      :: mine & (1 << k) -> region[k].held = 0
      :: else
      fi
    }
    finish(c)
  fi
}

/* Scrubber._take: to the next region that is due, from there on */
inline take_next(c, from)
{
  ok = 0;
  for (k : from .. 2 * c + 1) {
    if
    :: !ok && (work[c].todo & (1 << k)) && IS_DUE(k) ->
      if
      :: region[k].former -> work[c].r = k; work[c].pc = LOOK; ok = 1
      :: !region[k].former && synced -> work[c].r = k; work[c].pc = OPEN; ok = 1
      :: else
      fi
    :: else
    fi
  }
  if
  :: ok
  :: !ok && !work[c].done -> idle(c)
  :: else ->
    /* _scrub: `todo` is what is held, `done` what was scrubbed */
    work[c].todo = work[c].done;
    work[c].done = 0;
    debt[c] = 1;
    for (k : 2 * c .. 2 * c + 1) {
      if
      :: work[c].todo & (1 << k) -> begin_work_on(k)
      :: else
      fi
    }
    wipe_next(c)
  fi
}

inline wipe_next(c)
{
  ok = 0;
  for (k : 2 * c .. 2 * c + 1) {
    if
    :: !ok && synced && region[k].held && (work[c].todo & (1 << k)) ->
      work[c].r = k; work[c].pc = WIPE; ok = 1
    :: else
    fi
  }
  if
  :: ok
  :: !ok && !synced -> work[c].done = 0; work[c].pc = CLOSE
  :: else ->
    may_clear(c, work[c].done);
    work[c].pc = (ok -> CLEAR : CLOSE)
  fi
}

inline scrub_goes_on(c)
{
  if
  :: work[c].pc == LOAD ->
    for (k : 2 * c .. 2 * c + 1) {
      if
      :: IS_DUE(k) -> work[c].todo = work[c].todo | (1 << k)
      :: else
      fi
    }
    take_next(c, 2 * c)
  :: work[c].pc == LOOK ->
    was = work[c].r;
    if
    :: (region[was].former & runs) || !synced || !IS_DUE(was) ->
      was++;
      take_next(c, was)
    :: else -> work[c].pc = OPEN
    fi
  :: work[c].pc == OPEN ->
    was = work[c].r;
    region[was].held = 1;
    work[c].done = work[c].done | (1 << was);
    was++;
    take_next(c, was)
  :: work[c].pc == WIPE ->
    j = work[c].r;
    wipe(j);
    work[c].done = work[c].done | (1 << work[c].r);
    work[c].todo = work[c].todo & (15 - (1 << work[c].r));
    wipe_next(c)
  :: work[c].pc == CLEAR ->
    clear(c);
    pay_debt(c, work[c].done);
    work[c].pc = CLOSE
  :: work[c].pc == CLOSE ->
    for (j : 2 * c .. 2 * c + 1) {
      if
      :: region[j].held ->
        region[j].held = 0;
        if
        :: (work[c].done & (1 << j)) && !work[c].failed && region[j].cond == SCRUBBING -> clean(j)
        :: else
        fi;
        if  /* after one that was disturbed the others are not believed either */
        :: region[j].cond == SCRUBBING -> set_cond(j, DIRTY); region[j].left = 0
        :: else
        fi
      :: else
      fi
    }
    idle(c)
  fi
}

#define CARD_DUE(c) (IS_DUE(2 * (c)) || IS_DUE(2 * (c) + 1))
#define CARD_OWES(c) (debt[c] && !OWNED(2 * (c)) && !OWNED(2 * (c) + 1) \
                      && region[2 * (c)].cond == BLANK && region[2 * (c) + 1].cond == BLANK)

/* ------------------------------------------------------------------ lives */

/* The plugin's process ends and begins again: the journal is as the memory was. */
inline crash()
{
  for (k : 0 .. NR - 1) {
    region[k].held = 0;
    region[k].left = 0;
    if
    :: region[k].cond == SCRUBBING -> region[k].cond = DIRTY
    :: region[k].cond == PROGRAMMED && !OWNED(k) -> region[k].cond = DIRTY
    :: else
    fi
  }
  for (j : 0 .. CARDS - 1) { idle(j) }
  for (k : 1 .. CLAIMS) {
    claim[k].work = 0; claim[k].read = 0; claim[k].call = 0;
    claim[k].file = (claim[k].st == PREPARED)
  }
  synced = 0
}

/* What a thread was about to do is done, and nobody hears of it. */
inline dying_effect(c)
{
  if
  :: work[c].kind && work[c].pc == WIPE -> j = work[c].r; wipe(j)
  :: work[c].kind && work[c].pc == CLEAR -> clear(c)
  :: work[c].kind == PREPARE && work[c].pc == BRING && WANT(work[c].owner) ->
    region[work[c].r].image = work[c].owner
  :: else
  fi
}

/* Its containers run on, and it asks for all claims anew. */
inline kubelet_restarts()
{
  for (k : 1 .. CLAIMS) { claim[k].call = 0; claim[k].ready = 0 }
}

/* Holders.join: these pods use a claim; what is not prepared no container of theirs has. */
inline joins_in(p)
{
  if
  :: HAS(p) ->
    if
    :: claim[p].st == PREPARED -> had = had | (pods & BOTH(p) & (255 - known))
    :: else
    fi;
    known = known | (pods & BOTH(p))
  :: else
  fi
}

/* ClaimReconciler._adopt and _part: pods that come to a claim, and those that are done with it and gone */
inline read_record()
{
  for (k : 1 .. CLAIMS) {
    if
    :: HAS(k) && claim[k].rec ->
      joins_in(k);
      known = known & (pods | (255 - BOTH(k)));
      had = had & (pods | (255 - BOTH(k)))
    :: else
    fi
  }
}

/* Kubelet's record lacks a claim, and the API server says that it is over: its pods' cgroups alone tell now. */
inline part(p)
{
  for (k : FIRST(claim[p].has) .. LAST(claim[p].has)) {
    region[k].former = region[k].former | (had & BOTH(p));
    if
    :: region[k].cond == SCRUBBING && (known & BOTH(p)) -> region[k].left = 1
    :: else
    fi
  }
  known = known & (255 - BOTH(p))
}
#define UNREAD(p) (HAS(p) && claim[p].rec && ((pods & BOTH(p) & (255 - known)) || (known & BOTH(p) & (255 - pods))))
#if CLAIMS == 1
#define NEWS UNREAD(1)
#elif CLAIMS == 2
#define NEWS (UNREAD(1) || UNREAD(2))
#else
#define NEWS (UNREAD(1) || UNREAD(2) || UNREAD(3))
#endif

/* ------------------------------------------------------------------ steps */

/* The shared counters: never a whole card and its regions, never one of them twice. */
#define GIVEN(p, q, d) (p != q && claim[q].api == ALLOCATED && OVERLAP(claim[q].dev, d))
#if CLAIMS == 1
#define FREE(p, d) true
#elif CLAIMS == 2
#define FREE(p, d) (!GIVEN(p, 1, d) && !GIVEN(p, 2, d))
#else
#define FREE(p, d) (!GIVEN(p, 1, d) && !GIVEN(p, 2, d) && !GIVEN(p, 3, d))
#endif
#define PREVIOUS(p) (p == 1 || claim[p - 1].api)

/* A pod that comes anew has another uid than any that the ledger has. */
#define NEW(p) (((known | had) & POD(p, 1)) -> 2 : 1)
#define IS_NEW(p) (((known | had) & BOTH(p)) != BOTH(p))

#define ALLOCATE(p, d) \
  :: d_step { !claim[p].api && PREVIOUS(p) && FREE(p, d) -> \
     claim[p].api = ALLOCATED; claim[p].dev = d; pods = pods | POD(p, 1); TOLD(allocate, p, d * 10 + 1) } \
  :: d_step { claim[p].api == FREED && !claim[p].rec && !(pods & BOTH(p)) && again < AGAIN && FREE(p, d) && ANOTHER(p, d) && IS_NEW(p) -> \
     again++; claim[p].api = ALLOCATED; claim[p].dev = d; add = NEW(p); pods = pods | POD(p, add); TOLD(allocate, p, d * 10 + add) }

#ifdef BUG_UNASKED
#define NONE_RUNS(p) true
#else
#define NONE_RUNS(p) (!(runs & had & BOTH(p)))
#endif
#ifdef BUG_ANSWER
#define UNPREPARED(p) true
#else
#define UNPREPARED(p) (!LEFT(p))
#endif

/* For random traces: what ends things seldom comes before they began, and nothing waits for a deadline. */
#ifdef PATIENT
#define LONG_ENOUGH(p, n) ((runs & POD(p, n)) || FORGOTTEN(p))
#define SOMETHING_GOES_ON (work[0].kind && (runs || work[0].pc > OPEN))
#define GIVES_UP(p) false
#define FIRST_LOSS (lost == 0)
#define LEAVES(p) (lost && (claim[p].work >= WORKED || claim[p].call == UNPREPARE_CALL))
#else
#define LONG_ENOUGH(p, n) true
#define SOMETHING_GOES_ON true
#define GIVES_UP(p) (claim[p].work == TRIES)
#define FIRST_LOSS true
#define LEAVES(p) true
#endif

/* And for those in which claims are allocated anew while the plugin has them: nothing ends or revives them before. */
#ifdef ANEW
#define ANOTHER(p, d) (!HAS(p) || claim[p].has != d)
#define FORGOTTEN(p) (HAS(p) && !claim[p].rec && again < AGAIN)
#else
#define ANOTHER(p, d) true
#define FORGOTTEN(p) false
#endif

inline unprepared(p, arrives)
{
  /* 4: nothing of it is left, or another claim has it and gets it scrubbed */
  if
  :: claim[p].st == ENDED ->
    for (k : FIRST(claim[p].has) .. LAST(claim[p].has)) {
      assert(OWNED(k) || (region[k].cond == BLANK && region[k].data == 0 && region[k].image == 0))
    }
  :: else
  fi;
  claim[p].call = 0;
  if
  :: arrives -> claim[p].rec = 0
  :: else
  fi
}

#define OF_POD(p, n) \
  :: d_step { (pods & POD(p, n)) && claim[p].ready && claim[p].file && !(runs & POD(p, n)) -> \
     runs = runs | POD(p, n); attach(p, n); TOLD(start, p, n) } \
  :: d_step { (runs & POD(p, n)) && SOMETHING_GOES_ON -> stop(p, n); TOLD(stop, p, n) } \
  :: d_step { (pods & POD(p, n)) && LONG_ENOUGH(p, n) -> \
     stop(p, n); pods = pods & (255 - POD(p, n)); TOLD(end, p, n) }

#define OF_CLAIM(p) \
  OF_POD(p, 1) \
  OF_POD(p, 2) \
  /* the scheduler and the API server */ \
  :: d_step { claim[p].api == ALLOCATED && !(pods & BOTH(p)) -> claim[p].api = FREED; TOLD(free, p, 0) } \
  :: d_step { claim[p].api == ALLOCATED && (runs & BOTH(p)) && forced < FORCED -> \
     forced++; claim[p].api = FREED; TOLD(free_by_force, p, 0) } \
  /* kubelet */ \
  :: d_step { claim[p].api == ALLOCATED && claim[p].ready && !(pods & POD(p, 2)) && (pods & BOTH(p)) && !((known | had) & POD(p, 2)) && joins < JOINS -> \
     joins++; pods = pods | POD(p, 2); TOLD(join, p, 0) } \
  :: d_step { claim[p].api == ALLOCATED && !(pods & BOTH(p)) && !claim[p].call && again < AGAIN && IS_NEW(p) -> \
     again++; add = NEW(p); pods = pods | POD(p, add); TOLD(again, p, add) } \
  :: d_step { (pods & BOTH(p)) && claim[p].api == ALLOCATED && !claim[p].ready && !claim[p].call && \
     (!FORGOTTEN(p) || claim[p].dev != claim[p].has) -> \
     claim[p].rec = 1; claim[p].call = PREPARE_CALL; \
     if \
     :: !claim[p].work -> claim[p].work = READS; claim[p].joined = 0 \
     :: else -> claim[p].joined = 1 \
     fi; \
     TOLD(prepare, p, 0) } \
  :: d_step { claim[p].rec && !(pods & BOTH(p)) && !claim[p].call && (claim[p].st || synced) -> \
     claim[p].ready = 0; claim[p].call = UNPREPARE_CALL; end_claim(p); TOLD(unprepare, p, 0) } \
  :: d_step { claim[p].call == UNPREPARE_CALL && !LEFT(p) && lost < LOST -> \
     lost++; unprepared(p, false); TOLD(unprepared_lost, p, 0) } \
  :: d_step { claim[p].call == UNPREPARE_CALL && UNPREPARED(p) -> unprepared(p, true); TOLD(unprepared, p, 0) } \
  :: d_step { claim[p].call && lost < LOST && LEAVES(p) -> lost++; claim[p].call = 0; TOLD(kubelet_gives_up, p, 0) } \
  /* the plugin */ \
  :: d_step { claim[p].work == READS -> claim_read(p); TOLD(claim_read, p, 0) } \
  /* first it lets go of what it is no longer allocated, whether it gets the other or not */ \
  :: d_step { claim[p].work == TRIES && synced && !FORMER(p) && !BUSY(p) && CAN_TAKE(p) -> \
     take(p); TOLD(take, p, 0) } \
  :: d_step { claim[p].work == TRIES && synced && FORMER(p) && !BUSY(p) -> \
     LET_GO(p); forget(p); known = known & (255 - BOTH(p)); TOLD(leave, p, 0) } \
  :: d_step { GIVES_UP(p) -> \
     fails(p); TOLD(plugin_gives_up, p, 0) } \
  :: d_step { claim[p].work == LOOKS -> \
     last_look(p); TOLD(look, p, 0) } \
  :: d_step { claim[p].call == PREPARE_CALL && !claim[p].work && claim[p].st == PREPARED && lost < LOST && FIRST_LOSS -> \
     lost++; claim[p].file = 1; claim[p].call = 0; TOLD(prepared_lost, p, 0) } \
  :: d_step { claim[p].call == PREPARE_CALL && !claim[p].work && claim[p].st == PREPARED -> \
     claim[p].file = 1; claim[p].call = 0; claim[p].ready = 1; TOLD(prepared, p, 0) } \
  :: d_step { HAS(p) && !claim[p].rec && synced && (claim[p].api != ALLOCATED || !(pods & BOTH(p))) && NONE_RUNS(p) && !FORGOTTEN(p) -> \
     end_claim(p); TOLD(end_lost, p, 0) } \
  :: d_step { HAS(p) && !claim[p].rec && synced && (claim[p].api != ALLOCATED || !(pods & BOTH(p))) && !NONE_RUNS(p) && (known & BOTH(p)) -> \
     part(p); TOLD(part, p, 0) } \
  :: d_step { claim[p].st == ENDED && !claim[p].rec && synced && !LEFT(p) -> forget(p); TOLD(forget, p, 0) }

#ifdef BUG_LEAVE
#define LET_GO(p) had = had & (255 - BOTH(p))
#else
#define LET_GO(p) release(p)
#endif
#define FORMER(p) (HAS(p) && claim[p].has != claim[p].read)
#define OVERLAPS(p, q) (p != q && HAS(q) && OVERLAP(claim[q].has, claim[p].read))
#ifdef BUG_HELD
#define CAN_TAKE(p) true
#elif CLAIMS == 1
#define CAN_TAKE(p) true
#elif CLAIMS == 2
#define CAN_TAKE(p) (!OVERLAPS(p, 1) && !OVERLAPS(p, 2))
#else
#define CAN_TAKE(p) (!OVERLAPS(p, 1) && !OVERLAPS(p, 2) && !OVERLAPS(p, 3))
#endif

/* Whoever waits for a preparation is told that it failed. */
inline fails(p)
{
  claim[p].work = 0;
  claim[p].read = 0;
  if
  :: claim[p].call == PREPARE_CALL -> claim[p].call = 0
  :: else
  fi
}

/* Of an earlier call's work the result is held against what the API server says now. */
inline succeeded(p)
{
  claim[p].work = 0;
  claim[p].read = 0;
  if
  :: claim[p].joined && claim[p].call == PREPARE_CALL -> claim[p].work = READS
  :: else
  fi;
  claim[p].joined = 0
}

/* What the API server says; what was prepared for another allocation is withdrawn. */
inline claim_read(p)
{
  if
  :: claim[p].api != ALLOCATED -> fails(p)
  :: claim[p].api == ALLOCATED && claim[p].st == PREPARED && claim[p].has == claim[p].dev ->
    joins_in(p); succeeded(p)
  :: else ->
    if
    :: claim[p].st == PREPARED -> claim[p].st = TAKEN; claim[p].file = 0
    :: else
    fi;
    claim[p].read = claim[p].dev;
    claim[p].work = TRIES
  fi
}

/* Preparer.check_result and Ledger.prepared */
inline last_look(p)
{
  ok = 1;
  for (k : FIRST(claim[p].has) .. LAST(claim[p].has)) {
    if
    :: region[k].cond != (WANT(p) -> PROGRAMMED : BLANK) || region[k].image != WANT(p) -> ok = 0
    :: else
    fi
  }
  if
  :: ok -> claim[p].st = PREPARED; claim[p].used = 1; had = had | (known & BOTH(p)); succeeded(p)
  :: else -> claim[p].work = TRIES
  fi
}

#define PREPARES(c, p) \
  :: d_step { work[c].kind == NOBODY && claim[p].work == QUEUED && CARD(claim[p].has) == c -> \
     prepare_begins(c, p); TOLD(begin, c, p) }

#if CLAIMS == 1
#define ALL_PREPARE(c) PREPARES(c, 1)
#elif CLAIMS == 2
#define ALL_PREPARE(c) PREPARES(c, 1) PREPARES(c, 2)
#else
#define ALL_PREPARE(c) PREPARES(c, 1) PREPARES(c, 2) PREPARES(c, 3)
#endif

#define WORKS(c) \
  ALL_PREPARE(c) \
  :: d_step { work[c].kind == NOBODY && synced && CARD_DUE(c) -> \
     work[c].kind = SCRUB; work[c].pc = LOAD; TOLD(scrub, c, 0) } \
  :: d_step { work[c].kind == NOBODY && synced && CARD_OWES(c) && !CARD_DUE(c) -> \
     work[c].kind = PAY; work[c].pc = CLEAR; TOLD(pay, c, 0) } \
  :: d_step { work[c].kind == PREPARE -> prepare_goes_on(c); TOLD(work, c, 0) } \
  :: d_step { work[c].kind == SCRUB -> scrub_goes_on(c); TOLD(work, c, 0) } \
  :: d_step { work[c].kind == PAY -> \
     clear(c); pay_debt(c, 3 << (2 * c)); idle(c); TOLD(work, c, 0) } \
  :: d_step { work[c].kind && crashes < CRASHES && (work[c].pc == WIPE || work[c].pc == CLEAR || work[c].pc == BRING) -> \
     crashes++; dying_effect(c); crash(); TOLD(crash_after, c, 0) }

#if CARDS == 1
#define DEVICES(p) ALLOCATE(p, 0) ALLOCATE(p, 1) ALLOCATE(p, 2)
#else
#define DEVICES(p) ALLOCATE(p, 0) ALLOCATE(p, 1) ALLOCATE(p, 2) ALLOCATE(p, 3) ALLOCATE(p, 4) ALLOCATE(p, 5)
#endif

init {
  d_step {
    for (i : 0 .. NR - 1) { region[i].cond = BLANK }
    synced = 1;
    TOLD(power_on, 0, 0)
  }
  do
  /* Regions and cards are alike but for the order in which a card's regions are worked on. */
  ALLOCATE(1, 0) ALLOCATE(1, NR)
  OF_CLAIM(1)
#if CLAIMS > 1
  DEVICES(2)
  OF_CLAIM(2)
#endif
#if CLAIMS > 2
  DEVICES(3)
  OF_CLAIM(3)
#endif
  WORKS(0)
#if CARDS > 1
  WORKS(1)
#endif
  :: d_step { NEWS || !synced -> read_record(); synced = 1; TOLD(record_read, 0, 0) }
  :: d_step { crashes < CRASHES && SOMETHING_GOES_ON -> crashes++; crash(); TOLD(crash, 0, 0) }
  :: d_step { restarts < RESTARTS && SOMETHING_GOES_ON -> restarts++; kubelet_restarts(); TOLD(kubelet_restarts, 0, 0) }
  /* Also with the plugin's process. What it has of pods was read before: else nothing tells of a second pod whose claim
     is deleted, too */
  :: d_step { wipes < WIPES && (SOMETHING_GOES_ON || !synced) && !NEWS -> \
     wipes++; kubelet_restarts(); \
     for (k : 1 .. CLAIMS) { claim[k].rec = 0 } \
     TOLD(record_lost, 0, 0) }
  :: timeout ->
    /* 9: whatever happened, what is left in the end is clean */
    d_step {
      for (i : 1 .. CLAIMS) { assert(claim[i].st == 0 && !claim[i].file) }
      for (i : 0 .. NR - 1) {
        assert(region[i].cond == BLANK && region[i].image == 0 && region[i].data == 0)
      }
      for (i : 0 .. CARDS - 1) { assert(!debt[i] && memory[i] == 0) }
    }
    break
  od
}

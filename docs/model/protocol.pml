/* The protocol between kubelet, plugin and cards; docs/model/README.md says what it is and is not.
 *
 * One process, whose every step is atomic: between any two steps of the plugin anything may happen.
 * The plugin's steps end where its code awaits: a step is the end of what a thread did (the effect),
 * and what the event loop does with it until it awaits again. Names are the code's.
 *
 * Size:    PODS (1 to 3), CARDS (1 or 2, of two regions each; 4 + n is card n as a whole)
 * Kubelet: EXTENDED (Deallocate and PostStop; else the plugin reads kubelet's records)
 * Budgets: CALLS (PreStarts of each pod), CRASHES, RESTARTS, FORCED, LOST
 * Pods:    BLANK_POD asks for no bitstream (0: each asks for one); WHOLES or REGIONS_ONLY
 * Traces:  TRACE prints each step and state; PATIENT makes random ones get further
 * Bugs:    BUG_..., each a mistake that the checker has to find
 * Kubelet: STRICT_CLEAR, LATE_OWNERS, UNHEARD_FIRST take less for granted (README.md)
 */

#ifndef PODS
#define PODS 2
#endif
#ifndef CARDS
#define CARDS 1
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef RESTARTS
#define RESTARTS 1
#endif
#ifndef FORCED
#define FORCED 1
#endif
#ifndef LOST
#define LOST 1
#endif
#ifndef BLANK_POD
#define BLANK_POD 2
#endif

#define NR (2 * CARDS)
#define ND (3 * CARDS)
#define CARD(d)  ((d) < NR -> (d) / 2 : (d) - NR)
#define FIRST(d) ((d) < NR -> (d) : 2 * ((d) - NR))
#define LAST(d)  ((d) < NR -> (d) : 2 * ((d) - NR) + 1)
#define COVERS(d, r) (FIRST(d) <= (r) && (r) <= LAST(d))
#define WHOLE(r) (NR + (r) / 2)
#define BIT(p)   (1 << ((p) - 1))
#define WANT(p)  ((p) == BLANK_POD -> 0 : (p))

/* Conditions; FAULTED and UNBLANKED are left out. */
#define DIRTY 0
#define SCRUBBING 1
#define BLANK 2
#define PROGRAMMED 3

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

/* A pod: its phase, and whether its container runs. */
#define PENDING 0
#define ADMITTED 1
#define CALLED 2
#define ENDED 3
#define GATED 1
#define UNGATED 2
/* A PreStart under way, and its preparation. */
#define IDENTIFY 1
#define WAITS 2
#define QUEUED 1
#define WORKED 2
#define DONE 3

typedef Pod {
  unsigned phase : 2; unsigned dev : 3; unsigned runs : 2; unsigned owed : 2; bit unheard;
  unsigned call : 2; bit lease; unsigned calls : 2
};
typedef Claim {
  bit has; bit touched; bit started; bit exposed; bit inherited; bit uncounted;
  unsigned owner : 2; unsigned due : 3; unsigned absent : 2
};
typedef Region {
  unsigned cond : 2; unsigned former : 3; bit left; bit used;  /* what the ledger knows */
  unsigned image : 2; unsigned data : 3; unsigned att : 3; bit held  /* what is */
};
typedef Prep { unsigned st : 2; unsigned owner : 2; bit known; bit ok; bit same };
typedef Work {
  unsigned kind : 2; unsigned pc : 3; unsigned dev : 3; unsigned owner : 2; bit known; bit lease; bit life;
  unsigned r : 2; unsigned todo : 4; unsigned done : 4; bit failed
};

Pod pod[PODS + 1];
Claim claim[ND];
Region region[NR];
Prep prep[ND];
Work work[CARDS];
bit debt[CARDS];
byte memory[CARDS];
bit synced, ungated;
bit unread;  /* kubelet's records, since the plugin's process began (Ledger.unreconciled) */
#ifndef EXTENDED
bit amnesia;  /* kubelet's List may lack what its pods have, since it restarted */
#endif
unsigned crashes : 2, restarts : 2, forced : 2, lost : 2;

hidden byte i, j, k, add, was, quiet, used, ok;

/* ------------------------------------------------------------------ what always holds */

#ifdef TRACE
#define TOLD(name, x, y) printf("STEP "); printf(#name); printf(" %d %d", x, y); tell(); always()
inline tell()
{
  for (i : 0 .. ND - 1) {
    printf(" C%d%d%d%d%d%d", claim[i].has, claim[i].touched, claim[i].started, claim[i].exposed,
           claim[i].owner, claim[i].due)
  }
  for (i : 0 .. NR - 1) {
    printf(" R%d%d%d%d%d", region[i].cond, region[i].former, region[i].image, region[i].data,
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
    if
    :: !claim[i].has && !claim[WHOLE(i)].has && region[i].cond == BLANK ->
      assert(region[i].image == 0 && region[i].data == 0 && region[i].att == 0)
    :: else
    fi
  }
  for (i : 0 .. CARDS - 1) {
    if
    :: !claim[2 * i].has && !claim[2 * i + 1].has && !claim[NR + i].has && !debt[i] &&
       region[2 * i].cond == BLANK && region[2 * i + 1].cond == BLANK ->
      assert(memory[i] == 0)
    :: else
    fi;
    /* 1: a claim of a card excludes claims of its regions */
    assert(!claim[NR + i].has || (!claim[2 * i].has && !claim[2 * i + 1].has))
  }
  for (i : 1 .. PODS) {
    if
    :: pod[i].phase == ADMITTED || pod[i].phase == CALLED ->
      assert(claim[pod[i].dev].has);  /* 3: an owner keeps its device; 6: no call ends it */
      for (j : i + 1 .. PODS) {       /* 1: and nobody else has it */
        assert(!(pod[j].phase == ADMITTED || pod[j].phase == CALLED) ||
               LAST(pod[i].dev) < FIRST(pod[j].dev) || LAST(pod[j].dev) < FIRST(pod[i].dev))
      }
    :: else
    fi
  }
  i = 0; j = 0; k = 0; add = 0; was = 0; quiet = 0; used = 0; ok = 0
}

/* ------------------------------------------------------------------ ledger */

#define USED(d)      (claim[d].started || claim[d].exposed)
#define COUNTABLE(d) (!claim[d].exposed && !claim[d].uncounted)
#define STOPPED(d)   (claim[d].touched && COUNTABLE(d) && claim[d].due == 0)
#define CLAIM_OF(r)  (claim[r].has -> (r) : WHOLE(r))  /* where one has */
#define OWNED(r)     (claim[r].has || claim[WHOLE(r)].has)
#define IS_DUE(r)    (region[r].cond == DIRTY && (!OWNED(r) || !USED(CLAIM_OF(r)) || STOPPED(CLAIM_OF(r))))

inline set_cond(r, c)
{
  region[r].cond = c;
  prep[r].same = 0;
  prep[WHOLE(r)].same = 0
}

/* The end of a claim (Claims._release); the claim may be made anew. Who never used it leaves nothing. */
inline release(d)
{
  quiet = STOPPED(d);
  if
  :: !COUNTABLE(d) && claim[d].due == 0 -> claim[d].due = 1
  :: else
  fi;
  for (k : FIRST(d) .. LAST(d)) {
    /* Balanced PostStops may be others': of a used region only a scrub since then shows the end */
    used = region[k].used;
#ifdef BUG_COUNTS
    used = used && !quiet;
#endif
    add = (used && claim[d].owner -> BIT(claim[d].owner) : 0);
    if
    :: region[k].cond != SCRUBBING && (used || region[k].cond != BLANK) -> set_cond(k, DIRTY)
    :: else
    fi;
#ifndef BUG_FORMER
    if
    :: (region[k].former | add) != region[k].former ->
      region[k].former = region[k].former | add;
      if
      :: region[k].cond == SCRUBBING -> region[k].left = 1
      :: else
      fi
    :: else
    fi;
#endif
    region[k].used = 0
  }
  claim[d].has = 0; claim[d].touched = 0; claim[d].started = 0; claim[d].exposed = 0;
  claim[d].uncounted = 0;
  claim[d].inherited = 0; claim[d].owner = 0; claim[d].absent = 0;
  /* leases on it end, and what was prepared for it is dropped */
#ifndef BUG_HAND_OVER
  drop(d);
#endif
  if
  :: work[CARD(d)].kind == PREPARE && work[CARD(d)].dev == d -> work[CARD(d)].lease = 0
  :: else
  fi;
  for (k : 1 .. PODS) {
    if
    :: pod[k].dev == d -> pod[k].lease = 0
    :: else
    fi
  }
}

inline drop(d) { prep[d].st = 0; prep[d].owner = 0; prep[d].known = 0; prep[d].ok = 0; prep[d].same = 0 }

/* ------------------------------------------------------------------ what really happens */

/* The container comes by what is not held; from then on it may write there at any time. */
inline attach(p)
{
  for (k : FIRST(pod[p].dev) .. LAST(pod[p].dev)) {
    if
    :: !region[k].held ->
      region[k].att = region[k].att | BIT(p);
      region[k].data = region[k].data | BIT(p);
      memory[k / 2] = memory[k / 2] | BIT(p)
    :: else
    fi
  }
}

inline stop(p)
{
  pod[p].runs = 0;
  for (k : 0 .. NR - 1) { region[k].att = region[k].att & (7 - BIT(p)) }
}

inline owes(p)
{
#ifdef EXTENDED
  if
  :: pod[p].owed < 3 -> pod[p].owed++
  :: else
  fi
#else
  skip
#endif
}

inline fails(p) { pod[p].call = 0; pod[p].lease = 0; owes(p) }

/* A pod of which nothing is left is like any other. */
inline forget(p)
{
  if
  :: pod[p].phase == ENDED && !pod[p].runs && !pod[p].call ->
    pod[p].calls = 0;
    if
    :: pod[p].owed == 0 -> pod[p].dev = 0; pod[p].unheard = 0
    :: else
    fi
  :: else
  fi
}

#define ACTIVE(p) (pod[p].phase == ADMITTED || pod[p].phase == CALLED)
#if PODS == 1
#define HELD_BY_KUBELET(d) (ACTIVE(1) && pod[1].dev == d)
#elif PODS == 2
#define HELD_BY_KUBELET(d) ((ACTIVE(1) && pod[1].dev == d) || (ACTIVE(2) && pod[2].dev == d))
#else
#define HELD_BY_KUBELET(d) ((ACTIVE(1) && pod[1].dev == d) || (ACTIVE(2) && pod[2].dev == d) \
                            || (ACTIVE(3) && pod[3].dev == d))
#endif
#define ONE_RUNS(p, set) (((set) & BIT(p)) && pod[p].runs)
#if PODS == 1
#define RUNS(set) ONE_RUNS(1, set)
#elif PODS == 2
#define RUNS(set) (ONE_RUNS(1, set) || ONE_RUNS(2, set))
#else
#define RUNS(set) (ONE_RUNS(1, set) || ONE_RUNS(2, set) || ONE_RUNS(3, set))
#endif

/* 7: nobody is on a region that is reset or programmed */
inline wipe(r) { assert(region[r].att == 0); region[r].image = 0; region[r].data = 0 }

/* 7: nor on the card whose memory is cleared, and no neighbour has something in it */
inline clear(c)
{
  for (k : 2 * c .. 2 * c + 1) {
    assert(region[k].att == 0);
    assert(!OWNED(k) || region[k].held || work[c].kind == PAY || !claim[CLAIM_OF(k)].started)
  }
  memory[c] = 0
}

/* ------------------------------------------------------------------ work on a card */

/* Of no other region than `mine` somebody is, or may be, the owner. */
inline may_clear(c, mine)
{
  ok = 1;
  for (k : 2 * c .. 2 * c + 1) {
    if
    :: !((mine) & (1 << k)) && (OWNED(k) || RUNS(region[k].former)) -> ok = 0
    :: else
    fi
  }
  if
  :: unread -> ok = 0
  :: else
  fi;
#ifdef BUG_NEIGHBOUR
  ok = 1
#endif
}

inline owe(c)
{
#ifdef BUG_DEBT
  skip
#else
  debt[c] = 1
#endif
}

inline pay_debt(c, mine)
{
  ok = 1;
  for (k : 2 * c .. 2 * c + 1) {
    if
    :: !((mine) & (1 << k)) && region[k].cond != BLANK -> ok = 0
    :: else
    fi
  }
  if
  :: ok -> debt[c] = 0
  :: else
  fi
}

/* Nothing stays SCRUBBING that nobody works on (CardOperations.settle). */
inline settle(mine)
{
  for (k : 0 .. NR - 1) {
    if
    :: ((mine) & (1 << k)) && region[k].cond == SCRUBBING -> set_cond(k, DIRTY); region[k].left = 0
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
  work[c].kind = NOBODY; work[c].pc = 0; work[c].dev = 0; work[c].owner = 0; work[c].known = 0; work[c].lease = 0;
  work[c].life = 0; work[c].r = 0; work[c].todo = 0; work[c].done = 0; work[c].failed = 0
}

#define HOLDS(c) (work[c].lease && work[c].life)

#define SET_OF(d) ((d) < NR -> 1 << (d) : 3 << (2 * ((d) - NR)))

/* A preparation cannot go on: its ports are closed next. */
inline give_up(c)
{
  work[c].failed = 1;
  work[c].todo = 0;
  work[c].done = 0;
  settle(SET_OF(work[c].dev));
  work[c].pc = CLOSE
}

/* The end of a preparation; whoever waits for one that failed is told. */
inline finish(c)
{
  was = work[c].dev;
  if
  :: prep[was].st == WORKED ->
    prep[was].st = DONE;
    prep[was].ok = !work[c].failed;
    prep[was].same = 1;
    if
    :: work[c].failed ->
      for (k : 1 .. PODS) {
        if
        :: pod[k].call == WAITS && pod[k].dev == was -> fails(k); drop(was)
        :: else
        fi
      }
    :: else
    fi
  :: else
  fi;
  idle(c)
}

/* From clean to what the container asks for (Preparer._bring), region by region. */
inline bring_next(c)
{
  ok = 0;
  for (k : FIRST(work[c].dev) .. LAST(work[c].dev)) {
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

/* Conditions.clean of a region that was worked on; sets `failed` where something came between. */
inline clean(r)
{
  if
  :: region[r].cond == SCRUBBING && !region[r].left ->
    region[r].former = 0;
    set_cond(r, BLANK);
    if  /* nobody has begun on it since, but who began without a PreStart may */
    :: OWNED(r) && !claim[CLAIM_OF(r)].exposed -> region[r].used = 0
    :: else
    fi
  :: else -> work[r / 2].failed = 1
  fi
}

/* After its scrubs a preparation clears the memory, or leaves the debt. */
inline after_wipes(c)
{
  if
  :: !HOLDS(c) -> give_up(c)
  :: else ->
    may_clear(c, SET_OF(work[c].dev));
    work[c].r = 0;
    if
    :: ok -> work[c].pc = CLEAR
    :: !ok && work[c].dev >= NR -> give_up(c)  /* a card is not handed over with its debt */
    :: else -> work[c].todo = SET_OF(work[c].dev); work[c].done = 0; bring_next(c)
    fi
  fi
}

inline prepare_begins(c, d)
{
  prep[d].st = WORKED;
  work[c].kind = PREPARE; work[c].dev = d; work[c].owner = prep[d].owner;
  work[c].known = prep[d].known;
  work[c].lease = 1; work[c].life = 1;
  add = 0;
  for (k : FIRST(d) .. LAST(d)) { add = add | region[k].former }
  if
  :: prep[d].known -> add = add & (7 - BIT(prep[d].owner))
  :: else
  fi;
  work[c].pc = (add -> LOOK : OPEN)
}

inline prepare_goes_on(c)
{
  was = work[c].dev;
  if
  :: work[c].pc == LOOK ->
    add = 0;
    for (k : FIRST(was) .. LAST(was)) { add = add | region[k].former }
    if
    :: work[c].known -> add = add & (7 - BIT(work[c].owner))
    :: else
    fi;
    if
    :: RUNS(add) || !HOLDS(c) -> work[c].failed = 1; finish(c)
    :: else -> work[c].pc = OPEN
    fi
  :: work[c].pc == OPEN ->
    ok = 1;
    for (k : FIRST(was) .. LAST(was)) {
      for (j : 1 .. PODS) {
        if
        :: pod[j].runs == UNGATED && (region[k].att & BIT(j)) -> ok = 0
        :: else
        fi
      }
    }
    if
    :: !ok -> work[c].failed = 1; finish(c)
    :: else ->
      for (k : FIRST(was) .. LAST(was)) {
        region[k].held = 1;
        /* Preparer._needs_scrub, with `used` as it is now: both hold until the files are read */
        if
        :: region[k].cond == DIRTY || region[k].cond == SCRUBBING ||
           (WANT(work[c].owner) == 0 &&
               (region[k].cond == PROGRAMMED || (claim[was].has && USED(was)))) ->
          work[c].todo = work[c].todo | (1 << k)
        :: else
        fi
      }
      if
      :: work[c].todo -> work[c].pc = LOAD
      :: !work[c].todo && was >= NR && debt[c] && HOLDS(c) ->
        may_clear(c, SET_OF(was));
        if
        :: ok -> work[c].pc = CLEAR
        :: else -> give_up(c)
        fi
      :: else -> work[c].todo = SET_OF(was); bring_next(c)
      fi
    fi
  :: work[c].pc == LOAD ->
    if
    :: !HOLDS(c) -> give_up(c)
    :: else ->
      owe(c);
      ok = 0;
      for (k : FIRST(was) .. LAST(was)) {
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
    :: work[c].todo && HOLDS(c) -> work[c].r = LAST(was)
    :: work[c].todo && !HOLDS(c) -> give_up(c)
    :: else -> after_wipes(c)
    fi
  :: work[c].pc == CLEAR ->
    clear(c);
    pay_debt(c, SET_OF(was));
    work[c].todo = SET_OF(was);
    bring_next(c)
  :: work[c].pc == BRING ->
    j = work[c].r;
    if
    :: WANT(work[c].owner) == 0 ->  /* verified: it still reads as blank */
      assert(region[j].image == 0);
      if
      :: region[j].cond == BLANK -> set_cond(j, BLANK)
      :: else -> work[c].failed = 1
      fi
    :: else ->
      assert(region[j].att == 0 && (region[j].data & (7 - BIT(work[c].owner))) == 0);
      region[j].image = work[c].owner;
      if
      :: region[j].cond == SCRUBBING && !region[j].left && work[c].lease ->
        region[j].former = 0;
        set_cond(j, PROGRAMMED)
      :: else -> work[c].failed = 1
      fi
    fi;
    work[c].todo = work[c].todo & (15 - (1 << j));
    bring_next(c)
  :: work[c].pc == CLOSE ->
    for (k : FIRST(was) .. LAST(was)) { region[k].held = 0 }
    finish(c)
  fi
}

#define ASKS_OWNER(r) (OWNED(r) && USED(CLAIM_OF(r)) && claim[CLAIM_OF(r)].owner)

/* Scrubber._take: to the next region that is due, from there on; `used` says whether there is one. */
inline take_next(c, from)
{
  ok = 0;
  for (k : from .. 2 * c + 1) {
    if
    :: !ok && (work[c].todo & (1 << k)) && IS_DUE(k) ->
      if
      :: region[k].former || ASKS_OWNER(k) ->
        work[c].r = k; work[c].pc = LOOK; ok = 1
      :: !(region[k].former || ASKS_OWNER(k)) && synced ->
        work[c].r = k; work[c].pc = OPEN; ok = 1
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
    owe(c);
    for (k : 2 * c .. 2 * c + 1) {
      if
      :: work[c].todo & (1 << k) -> begin_work_on(k)
      :: else
      fi
    }
    wipe_next(c)
  fi
}

#ifdef BUG_RESTART
#define NOBODY_BEGAN(c) true
#else
#define NOBODY_BEGAN(c) (synced && work[c].life)
#endif

inline wipe_next(c)
{
  ok = 0;
  for (k : 2 * c .. 2 * c + 1) {
    if
    :: !ok && NOBODY_BEGAN(c) && region[k].held && (work[c].todo & (1 << k)) ->
      work[c].r = k; work[c].pc = WIPE; ok = 1
    :: else
    fi
  }
  if
  :: ok
  :: !ok && !NOBODY_BEGAN(c) -> work[c].done = 0; work[c].pc = CLOSE
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
    :: RUNS(region[was].former) ||
       (OWNED(was) && USED(CLAIM_OF(was)) && claim[CLAIM_OF(was)].owner &&
           pod[claim[CLAIM_OF(was)].owner].runs) ||
       !synced || !IS_DUE(was) ->
      was++;
      take_next(c, was)
    :: else -> work[c].pc = OPEN
    fi
  :: work[c].pc == OPEN ->
    was = work[c].r;
    ok = 1;
    for (j : 1 .. PODS) {
      if
      :: pod[j].runs == UNGATED && (region[was].att & BIT(j)) -> ok = 0
      :: else
      fi
    }
    if
    :: ok -> region[was].held = 1; work[c].done = work[c].done | (1 << was)
    :: else
    fi;
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
        :: (work[c].done & (1 << j)) && !work[c].failed && region[j].cond == SCRUBBING ->
          clean(j)
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
#define CARD_OWES(c) (debt[c] && !claim[2 * (c)].has && !claim[2 * (c) + 1].has && !claim[NR + (c)].has \
                      && region[2 * (c)].cond == BLANK && region[2 * (c) + 1].cond == BLANK)

/* ------------------------------------------------------------------ steps */

inline allocate(p, d)
{
  if
  :: unread -> pod[p].phase = ENDED
#ifndef BUG_MODE
  :: d < NR && claim[WHOLE(d)].has -> pod[p].phase = ENDED
  :: d >= NR && (claim[FIRST(d)].has || claim[LAST(d)].has) -> pod[p].phase = ENDED
#endif
  :: else ->
    if
    :: claim[d].has && !claim[d].touched && !claim[d].exposed -> claim[d].owner = 0
    :: else ->
      if
      :: claim[d].has -> release(d)
      :: else
      fi;
      claim[d].has = 1;
      claim[d].uncounted = 0
    fi;
    claim[d].absent = 0;
    for (k : 1 .. PODS) {  /* no more of earlier pods than the PostStop that kubelet had begun */
      if
      :: k != p && pod[k].dev == d && pod[k].owed ->
        pod[k].owed = (pod[k].owed > pod[k].unheard -> 1 : 0);
        pod[k].unheard = 0;
        forget(k)
      :: else
      fi
    }
    pod[p].phase = ADMITTED;
    pod[p].dev = d
  fi
}

inline identified(p)
{
  was = pod[p].dev;
  if
  :: !pod[p].lease -> fails(p); forget(p)
  :: else ->
    add = ACTIVE(p);
    if
    :: add ->
      assert(claim[was].owner == 0 || claim[was].owner == p);
      claim[was].owner = p
    :: else
    fi;
    if
#ifndef EXTENDED
    :: !add -> fails(p); forget(p)  /* nothing tells what it asks for */
#endif
    :: prep[was].st != 0 && prep[was].owner == p && prep[was].known == add ->
      if
      :: prep[was].st == DONE && !prep[was].ok -> drop(was); fails(p); forget(p)
      :: else -> pod[p].call = WAITS
      fi
    :: else ->
      drop(was);
      prep[was].st = QUEUED;
      prep[was].owner = p;
      prep[was].known = add;
      pod[p].call = WAITS
    fi
  fi
}

/* The last look and the hand-over (PreStarts._hand_over); `arrives`: so does the answer. */
inline hand_over(p, arrives)
{
  was = pod[p].dev;
  ok = pod[p].lease && prep[was].ok && prep[was].same;
  for (k : FIRST(was) .. LAST(was)) {
    if
    :: region[k].cond != (WANT(prep[was].owner) -> PROGRAMMED : BLANK) ||
       region[k].image != WANT(prep[was].owner) -> ok = 0
    :: else
    fi
  }
#ifdef BUG_HAND_OVER
  ok = 1;
#endif
  if
  :: ok && arrives ->
    /* 2: scrubbed since its last owner, and exactly what this container asks for */
    for (k : FIRST(was) .. LAST(was)) {
      assert((region[k].data & (7 - BIT(p))) == 0);
      assert(region[k].image == WANT(p));
      assert(region[k].att == 0 && !region[k].held);
      assert(was < NR || (memory[k / 2] & (7 - BIT(p))) == 0)
    }
    claim[was].started = 1;
    for (k : FIRST(was) .. LAST(was)) { region[k].used = 1 }
    drop(was);
    pod[p].call = 0;
    pod[p].lease = 0;
    pod[p].runs = GATED;
    owes(p);
    attach(p)
  :: else ->
    if
    :: ok ->
      claim[was].started = 1;
      for (k : FIRST(was) .. LAST(was)) { region[k].used = 1 }
    :: else
    fi;
    drop(was);
    fails(p)
  fi
}

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
  for (k : 0 .. ND - 1) {
    drop(k);
    claim[k].inherited = claim[k].has;
    claim[k].absent = 0
  }
  for (j : 0 .. CARDS - 1) { idle(j) }
  for (k : 1 .. PODS) {
    if
    :: pod[k].call -> fails(k); forget(k)
    :: else
    fi
  }
  synced = 0;
  unread = 1
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

/* Kubelet's checkpoint was read: whose claims these are (Owners). */
inline learn_owners()
{
  for (k : 1 .. PODS) {
    if
    :: ACTIVE(k) && claim[pod[k].dev].has && claim[pod[k].dev].owner == 0 ->
      claim[pod[k].dev].owner = k
    :: else
    fi
  }
}

inline kubelet_restarts()
{
  for (k : 0 .. ND - 1) {
    if
    :: claim[k].has ->
      claim[k].exposed = 1;
      for (j : FIRST(k) .. LAST(k)) { region[j].used = 1 }
    :: else -> claim[k].due = 0
    fi;
    claim[k].absent = 0;
    drop(k)
  }
  for (j : 0 .. CARDS - 1) { work[j].life = 0 }
  for (i : 1 .. PODS) {
    if
    :: pod[i].call -> fails(i)
    :: else
    fi;
    if
    :: pod[i].phase == ENDED -> pod[i].owed = 0
    :: else
    fi;
    forget(i)
  }
#ifndef LATE_OWNERS
  learn_owners();  /* at once, long before kubelet starts a container */
#endif
  synced = 0;
  ungated = 1;
#ifndef EXTENDED
  amnesia = 1
#endif
}

inline poststop(p)
{
  was = pod[p].dev;
  pod[p].owed--;
#ifdef UNHEARD_FIRST
  if
  :: pod[p].unheard -> pod[p].unheard = 0  /* of the start that the plugin did not hear of */
  :: else
  fi;
#endif
  if
  :: claim[was].due == 0
  :: claim[was].due ->
    claim[was].due--;
    if
    :: claim[was].has && STOPPED(was) && claim[was].started ->
      for (k : FIRST(was) .. LAST(was)) {
        if
        :: region[k].cond != SCRUBBING -> set_cond(k, DIRTY)
        :: else
        fi
      }
    :: else
    fi
  fi;
  forget(p)
}

/* Card's memory may be cleared in the instant after it was decided; kubelet takes longer to start. */
#ifdef STRICT_CLEAR
#define CLEARING false
#elif CARDS == 1
#define CLEARING (work[0].kind && work[0].pc == CLEAR)
#else
#define CLEARING ((work[0].kind && work[0].pc == CLEAR) || (work[1].kind && work[1].pc == CLEAR))
#endif

/* For random traces: what ends things seldom comes before they began. */
#ifdef PATIENT
#define LONG_ENOUGH(p) (pod[p].calls > 1 || pod[p].runs)
#define SOMETHING_GOES_ON (work[0].kind && (pod[1].runs || work[0].pc > OPEN))
#else
#define LONG_ENOUGH(p) true
#define SOMETHING_GOES_ON true
#endif

#ifdef BUG_HAND_OVER
#define LEASED(p) true
#else
#define LEASED(p) pod[p].lease
#endif

#define PREVIOUS(p) (p == 1 || pod[p - 1].phase != PENDING)

#define ADMIT(p, d) \
  :: d_step { pod[p].phase == PENDING && PREVIOUS(p) && !ungated && !HELD_BY_KUBELET(d) -> \
     allocate(p, d); TOLD(admit, p, d) }

#define POD(p) \
  :: d_step { pod[p].phase == ADMITTED && !ungated && !claim[pod[p].dev].touched \
              && !claim[pod[p].dev].exposed && claim[pod[p].dev].owner != 0 -> \
     if \
     :: unread -> pod[p].phase = ENDED; forget(p) \
     :: else -> claim[pod[p].dev].owner = 0; claim[pod[p].dev].absent = 0 \
     fi; \
     TOLD(admit_again, p, 0) } \
  :: d_step { ACTIVE(p) && !pod[p].runs && !pod[p].call && !ungated && pod[p].calls < CALLS -> \
     pod[p].phase = CALLED; pod[p].calls++; pod[p].call = IDENTIFY; pod[p].lease = 1; \
     claim[pod[p].dev].touched = 1; claim[pod[p].dev].absent = 0; \
     if \
     :: claim[pod[p].dev].inherited -> claim[pod[p].dev].uncounted = 1 \
     :: else \
     fi; \
     if \
     :: claim[pod[p].dev].due < 7 -> claim[pod[p].dev].due++ \
     :: else \
     fi; \
     TOLD(prestart, p, 0) } \
  :: d_step { pod[p].call == IDENTIFY -> identified(p); TOLD(identify, p, 0) } \
  :: d_step { pod[p].call == WAITS && prep[pod[p].dev].st == DONE && LEASED(p) -> \
     hand_over(p, true); forget(p); TOLD(start, p, 0) } \
  :: d_step { pod[p].call == WAITS && prep[pod[p].dev].st == DONE && pod[p].lease && lost < LOST -> \
     lost++; hand_over(p, false); forget(p); TOLD(start_lost, p, 0) } \
  :: d_step { pod[p].call == WAITS && (prep[pod[p].dev].st == 0 || !pod[p].lease) -> \
     fails(p); forget(p); TOLD(prestart_fails, p, 0) } \
  :: d_step { pod[p].call && lost < LOST -> \
     lost++; fails(p); forget(p); TOLD(prestart_late, p, 0) } \
  :: d_step { pod[p].runs && !CLEARING && UNATTACHED(p) -> attach(p); TOLD(attach, p, 0) } \
  :: d_step { pod[p].runs -> stop(p); forget(p); TOLD(stop, p, 0) } \
  :: d_step { ACTIVE(p) && LONG_ENOUGH(p) -> \
     pod[p].phase = ENDED; pod[p].call = 0; pod[p].lease = 0; stop(p); forget(p); \
     TOLD(end, p, 0) } \
  :: d_step { ACTIVE(p) && LONG_ENOUGH(p) && forced < FORCED && (pod[p].runs || pod[p].call) -> \
     forced++; pod[p].phase = ENDED; \
     if \
     :: pod[p].call && claim[pod[p].dev].owner != p -> pod[p].call = 0; pod[p].lease = 0 \
     :: else \
     fi; \
     forget(p); TOLD(end_by_force, p, 0) } \
  :: d_step { ungated && ACTIVE(p) && !pod[p].runs && !CLEARING -> \
     pod[p].runs = UNGATED; owes(p); attach(p); TOLD(start_ungated, p, 0) }

#define UNATTACHED(p) \
  ((!(region[FIRST(pod[p].dev)].att & BIT(p)) && !region[FIRST(pod[p].dev)].held) \
   || (!(region[LAST(pod[p].dev)].att & BIT(p)) && !region[LAST(pod[p].dev)].held))

#ifdef EXTENDED
#define STOPPED_POD(p) \
  :: d_step { pod[p].owed > (pod[p].runs -> 1 : 0) -> poststop(p); TOLD(poststop, p, 0) } \
  :: d_step { crashes < CRASHES && ACTIVE(p) && !pod[p].runs && !pod[p].call && !ungated && !pod[p].unheard -> \
     crashes++; crash(); pod[p].unheard = 1; owes(p); TOLD(crash_away, p, 0) }
#define RELEASED(d) \
  :: d_step { claim[d].has && !HELD_BY_KUBELET(d) -> release(d); TOLD(deallocate, d, 0) }
#else
#define STOPPED_POD(p)
#ifdef BUG_ONE_LIST
#define ABSENT(d) (claim[d].has && claim[d].absent >= 1)
#else
#define ABSENT(d) (claim[d].has && claim[d].absent == 2 && !HELD_BY_KUBELET(d))
#endif
#ifdef TRACE
/* As the plugin sees them: each List is of all devices (LISTS), each checkpoint too (SETTLES). */
#define RELEASED(d)
#else
#define RELEASED(d) \
  :: d_step { claim[d].has && synced && claim[d].absent < 2 && (amnesia || !HELD_BY_KUBELET(d)) -> \
     claim[d].absent++; TOLD(list_lacks, d, 0) } \
  :: d_step { claim[d].has && synced && claim[d].absent && HELD_BY_KUBELET(d) -> \
     claim[d].absent = 0; TOLD(list_has, d, 0) } \
  :: d_step { ABSENT(d) -> release(d); TOLD(reconcile, d, 0) }
#endif
#endif

#if defined(TRACE) && !defined(EXTENDED)
/* Several of the steps list_lacks, list_has and reconcile at once, of a card and its regions. `lacks`: of which
 * devices; those in `add` may end now if the checkpoint lacks them, too. */
#define LACKS(d, lacks) (((lacks) >> (d)) & 1)
#define MAY_LACK(d, lacks) \
  (LACKS(d, lacks) -> (claim[d].has && (amnesia || !HELD_BY_KUBELET(d))) : (!claim[d].has || HELD_BY_KUBELET(d)))
#define TELLS(d, lacks) (claim[d].has && (LACKS(d, lacks) -> (claim[d].absent < 2) : claim[d].absent))
#define LISTS(lacks) \
  :: d_step { synced && MAY_LACK(0, lacks) && MAY_LACK(1, lacks) && MAY_LACK(2, lacks) && \
              (TELLS(0, lacks) || TELLS(1, lacks) || TELLS(2, lacks)) -> \
     add = 0; \
     for (k : 0 .. ND - 1) { \
       if \
       :: LACKS(k, lacks) && claim[k].absent < 2 -> claim[k].absent++ \
       :: LACKS(k, lacks) && claim[k].absent == 2 \
       :: else -> claim[k].absent = 0 \
       fi; \
       if \
       :: claim[k].absent == 2 -> add = add | (1 << k) \
       :: else \
       fi \
     } \
     TOLD(list, lacks, add) }
#define SETTLES \
  :: d_step { ABSENT(0) || ABSENT(1) || ABSENT(2) -> \
     for (j : 0 .. ND - 1) { \
       if \
       :: ABSENT(j) -> release(j) \
       :: else \
       fi \
     } \
     TOLD(settle, 0, 0) }
#define RECONCILES LISTS(1) LISTS(2) LISTS(3) LISTS(4) LISTS(5) LISTS(6) LISTS(7) LISTS(0) SETTLES
#else
#define RECONCILES
#endif

#define PREPARES(c, d) \
  :: d_step { work[c].kind == NOBODY && prep[d].st == QUEUED -> \
     prepare_begins(c, d); TOLD(prepare, c, d) }

#define WORKS(c) \
  PREPARES(c, 2 * c) \
  PREPARES(c, 2 * c + 1) \
  PREPARES(c, NR + c) \
  :: d_step { work[c].kind == NOBODY && synced && CARD_DUE(c) -> \
     work[c].kind = SCRUB; work[c].pc = LOAD; work[c].life = 1; TOLD(scrub, c, 0) } \
  :: d_step { work[c].kind == NOBODY && synced && CARD_OWES(c) && !CARD_DUE(c) -> \
     work[c].kind = PAY; work[c].pc = CLEAR; TOLD(pay, c, 0) } \
  :: d_step { work[c].kind == PREPARE -> prepare_goes_on(c); TOLD(work, c, 0) } \
  :: d_step { work[c].kind == SCRUB -> scrub_goes_on(c); TOLD(work, c, 0) } \
  :: d_step { work[c].kind == PAY -> \
     clear(c); pay_debt(c, 3 << (2 * c)); idle(c); TOLD(work, c, 0) } \
  :: d_step { work[c].kind && crashes < CRASHES && (work[c].pc == WIPE || work[c].pc == CLEAR || work[c].pc == BRING) -> \
     crashes++; dying_effect(c); crash(); TOLD(crash_after, c, 0) }

#ifdef REGIONS_ONLY
#define DEVICES(p) ADMIT(p, 0) ADMIT(p, 1)
#elif CARDS == 1
#define DEVICES(p) ADMIT(p, 0) ADMIT(p, 1) ADMIT(p, 2)
#else
#define DEVICES(p) ADMIT(p, 0) ADMIT(p, 1) ADMIT(p, 2) ADMIT(p, 3) ADMIT(p, 4) ADMIT(p, 5)
#endif

/* Regions and cards are alike but for the order in which a card's regions are worked on. */
#ifdef ALL_ORDERS
#define FIRST_DEVICES DEVICES(1)
#elif defined(REGIONS_ONLY)
#define FIRST_DEVICES ADMIT(1, 0)
#else
#define FIRST_DEVICES ADMIT(1, 0) ADMIT(1, NR)
#endif

init {
  d_step {
    for (i : 0 .. NR - 1) { region[i].cond = BLANK }
    synced = 1;
    TOLD(power_on, 0, 0)
  }
  do
  FIRST_DEVICES
  POD(1)
  STOPPED_POD(1)
#if PODS > 1
  DEVICES(2)
  POD(2)
  STOPPED_POD(2)
#endif
#if PODS > 2
  DEVICES(3)
  POD(3)
  STOPPED_POD(3)
#endif
  RELEASED(0) RELEASED(1) RELEASED(2)
  RECONCILES
  WORKS(0)
#if CARDS > 1
  RELEASED(3) RELEASED(4) RELEASED(5)
  WORKS(1)
#endif
  :: d_step { crashes < CRASHES && SOMETHING_GOES_ON -> crashes++; crash(); TOLD(crash, 0, 0) }
  :: d_step { restarts < RESTARTS && SOMETHING_GOES_ON -> restarts++; kubelet_restarts(); TOLD(kubelet_restarts, 0, 0) }
  :: d_step { ungated -> ungated = 0; TOLD(registered, 0, 0) }
#ifndef EXTENDED
  :: d_step { amnesia -> amnesia = 0; TOLD(readmitted, 0, 0) }
#endif
  :: d_step { !synced && !ungated -> synced = 1; unread = 0; learn_owners(); TOLD(kubelet_answers, 0, 0) }
  :: timeout ->
    /* 9: whatever happened, what is left in the end is clean */
    d_step {
      for (i : 0 .. ND - 1) { assert(!claim[i].has) }
      for (i : 0 .. NR - 1) {
        assert(region[i].cond == BLANK && region[i].image == 0 && region[i].data == 0)
      }
      for (i : 0 .. CARDS - 1) { assert(!debt[i] && memory[i] == 0) }
    }
    break
  od
}

/* Lives of the plugin that are started differently: with the other API, another state directory, a copy of it, none.
 *
 * One region. Pod 0 asks for it by the device plugin API, the pods of a ResourceClaim (1) by DRA. What a life knows is
 * what the journal of its directory says; kubelet's records say who has the region; the marker says which life was last.
 * Kubelet's checkpoint can always be read, its record of claims by DRA always and else as the node is mounted.
 * A tenancy is one bit for each of the two, and one for those who are done with it (kubelet's word).
 *
 * Budgets: LIVES (starts), CHANGES (of the directory, its loss included), FORCED (deletions), WIPES (of the record of
 * claims), GIVEN (grants). Bugs: BUG_MARKER (it says which API served last, and forgets what the one before left),
 * BUG_BELIEVED (a directory that was put back is believed), BUG_UNREAD (a record that
 * cannot be read is empty), BUG_DIED (a life of DRA that lost its journal, and died before it read the record of claims,
 * leaves nothing), BUG_FORGOTTEN (a life that died before it read kubelet's records leaves a journal that the next one
 * takes for complete).
 */
#ifndef LIVES
#define LIVES 4
#endif
#ifndef CHANGES
#define CHANGES 2
#endif
#ifndef FORCED
#define FORCED 1
#endif
#ifndef WIPES
#define WIPES 1
#endif
#ifndef GIVEN
#define GIVEN 3
#endif

#define PODS 0
#define CLAIMS 1
#define NOBODY 2
#define COPY 2

typedef Journal {
  bit there;       /* it has content */
  byte owner;      /* PODS, CLAIMS or NOBODY */
  bit tenant[2];   /* these may have processes that use the region */
  bit left[2];     /* by kubelet's word they are done with it */
  bit clean;
  bit unknown;     /* claims may have it, though the journal has none */
  bit unasked;     /* kubelet's records may name an owner that the journal lacks */
}

Journal mem;        /* of the life that runs */
Journal kept[3];    /* two directories, and a copy of the first */

/* The marker. */
byte last = 0;      /* the directory whose content is the last life's */
byte served = PODS; /* the API */
bit claims = 0;     /* claims may have something */

/* The node. */
bit up = 0, synced = 0, reconciled = 0, seen = 0;
byte api, dir = 0;
bit has[2];         /* kubelet means the pod, or the claim, to have the region */
bit record[2];      /* and its record says so */
bit runs[2];        /* a container does */
bit dirty = 0;      /* somebody ran since the last scrub */
byte lives = 0, changes = 0, forced = 0, wipes = 0, given = 0;

inline copied(to, from) {
  to.there = from.there; to.owner = from.owner; to.clean = from.clean; to.unknown = from.unknown;
  to.unasked = from.unasked;
  to.tenant[0] = from.tenant[0]; to.tenant[1] = from.tenant[1];
  to.left[0] = from.left[0]; to.left[1] = from.left[1]
}

inline written() { mem.there = 1; copied(kept[dir], mem) }

inline emptied(j) {
  j.there = 0; j.owner = NOBODY; j.clean = 0; j.unknown = 0; j.unasked = 0;
  j.tenant[0] = 0; j.tenant[1] = 0; j.left[0] = 0; j.left[1] = 0
}

/* A life begins: allocation/journal/journal.py (_doubt), allocation/journal/doubt.py, allocation/journal/marker.py. */
inline starts(a) {
  api = a;
  copied(mem, kept[dir]);
  doubt = (last != dir || !mem.there) && lives > 0;
#ifdef BUG_BELIEVED
  doubt = doubt && !mem.there;
#endif
  if
  :: doubt ->
     mem.clean = 0;
     if
#ifdef BUG_DIED
     :: api == PODS && (claims || served == CLAIMS) -> mem.unknown = 1
#else
     :: api == CLAIMS || claims || served == CLAIMS -> mem.unknown = 1
#endif
     :: else
     fi
  :: else
  fi;
#ifdef BUG_FORGOTTEN
  reconciled = !doubt && served == api && lives > 0 && !mem.unknown;
#else
  if
  :: doubt || served != api || lives == 0 -> mem.unasked = 1
  :: else
  fi;
  reconciled = !mem.unasked && !mem.unknown;
#endif
#ifdef BUG_MARKER
  claims = 0;
#else
  claims = mem.owner == CLAIMS || mem.unknown || (doubt && claims) || api == CLAIMS;
#endif
  served = a; last = dir; synced = 0; up = 1; lives++;
  written()
}

inline ended(who) { /* the owner's allocation; its tenancy stays */
  mem.owner = NOBODY; mem.left[who] = 1; mem.clean = 0
}

inline adopted(who) {
  if
  :: record[who] && mem.owner == NOBODY -> mem.owner = who; mem.tenant[who] = 1; mem.left[who] = 0; mem.clean = 0
  :: else
  fi
}

/* deviceplugin/reconcile.py, allocation/reconcile/leftovers.py, dra/reconcile.py, dra/leftovers.py: one look at kubelet's records. */
inline reads() {
  adopted(PODS);
  if
  :: mem.owner == PODS && !record[PODS] -> ended(PODS)
  :: else
  fi;
  if
  :: seen || api == CLAIMS ->
     adopted(CLAIMS);
     if
     :: mem.owner == CLAIMS && !record[CLAIMS] && !has[CLAIMS] && !runs[CLAIMS] -> ended(CLAIMS)
     :: else
     fi;
     mem.unknown = 0
  :: else ->
     skip;
#ifdef BUG_UNREAD
     if
     :: mem.owner == CLAIMS && !runs[CLAIMS] -> ended(CLAIMS)
     :: else
     fi
#endif
  fi;
  synced = 1;
  /* Who is named and could not be adopted keeps the region back. */
  reconciled = (!record[PODS] || mem.owner == PODS) &&
               (!record[CLAIMS] || mem.owner == CLAIMS || (api == PODS && !seen));
  mem.unasked = !reconciled || mem.unknown;
  written()
}

#define LIVES_ON(who) (mem.tenant[who] && (!mem.left[who] || runs[who]))

inline grants(who) {
  assert(!runs[PODS] && !runs[CLAIMS]);  /* 1 */
  assert(!has[1 - who]);                 /* 1 */
  if
  :: !mem.clean -> dirty = 0             /* PreStart scrubs it: nobody but its owner may use it */
  :: else
  fi;
  assert(!dirty);                        /* 2 */
  mem.clean = 0; mem.owner = who; mem.tenant[who] = 1; mem.left[who] = 0;
  written();
  has[who] = 1; record[who] = 1; given++
}

/* Nobody runs of whom only a journal knows: of those no other one can tell. */
#define KNOWN ((record[PODS] || !runs[PODS]) && record[PODS] == has[PODS] && \
               (record[CLAIMS] || !runs[CLAIMS]) && record[CLAIMS] == has[CLAIMS])

active proctype node() {
  bit doubt = 0;
  d_step { emptied(mem); emptied(kept[0]); emptied(kept[1]); emptied(kept[COPY]) }
end:
  do
  /* Between two lives. */
  :: d_step { !up && lives < LIVES -> printf("starts PODS unseen\n"); starts(PODS); seen = 0 }
  :: d_step { !up && lives < LIVES -> printf("starts PODS seen\n"); starts(PODS); seen = 1 }
  :: d_step { !up && lives < LIVES -> printf("starts CLAIMS\n"); starts(CLAIMS) }
  :: d_step { up -> printf("dies\n"); up = 0 }
  :: d_step { !up && changes < CHANGES && KNOWN -> printf("other directory\n"); changes++; dir = 1 - dir }
  :: d_step { !up && changes < CHANGES && KNOWN && kept[0].there -> printf("copied\n"); changes++; copied(kept[COPY], kept[0]) }
  :: d_step { !up && changes < CHANGES && KNOWN && dir == 0 && kept[COPY].there -> printf("copy put back\n");
       changes++; copied(kept[0], kept[COPY]); last = COPY }
  :: d_step { !up && changes < CHANGES && KNOWN && kept[dir].there -> printf("lost\n"); changes++; emptied(kept[dir]); last = COPY }

  /* The plugin. */
  :: d_step { up && (!synced || mem.unknown || mem.owner != NOBODY) -> printf("reads\n"); reads() }
  :: d_step { up && synced && mem.owner == NOBODY && !mem.clean && !mem.unknown && reconciled &&
              !LIVES_ON(PODS) && !LIVES_ON(CLAIMS) -> printf("scrubs\n");
       assert(!runs[PODS] && !runs[CLAIMS]);     /* 7 */
       assert(!has[PODS] && !has[CLAIMS]);       /* 3 */
       mem.clean = 1; mem.tenant[0] = 0; mem.tenant[1] = 0; mem.left[0] = 0; mem.left[1] = 0;
       dirty = 0; written() }
  :: d_step { up && reconciled && mem.owner == NOBODY && !mem.unknown && given < GIVEN &&
              !mem.tenant[PODS] && !mem.tenant[CLAIMS] && !has[api] -> printf("grants\n"); grants(api) }

  /* Kubelet and the pods. A container starts whenever kubelet means its pod to have the region, again too. */
  :: d_step { has[PODS] && !runs[PODS] -> printf("PODS runs\n"); runs[PODS] = 1; dirty = 1 }
  :: d_step { has[CLAIMS] && !runs[CLAIMS] -> printf("CLAIMS runs\n"); runs[CLAIMS] = 1; dirty = 1 }
  :: d_step { runs[PODS] -> printf("PODS stops\n"); runs[PODS] = 0 }
  :: d_step { runs[CLAIMS] -> printf("CLAIMS stops\n"); runs[CLAIMS] = 0 }
  :: d_step { has[PODS] && !runs[PODS] -> printf("PODS ends\n"); has[PODS] = 0; record[PODS] = 0 }
  :: d_step { has[CLAIMS] && !runs[CLAIMS] && up && api == CLAIMS -> printf("CLAIMS unprepared\n");
       has[CLAIMS] = 0; record[CLAIMS] = 0;      /* Unprepare */
       if
       :: mem.owner == CLAIMS -> ended(CLAIMS); written()
       :: else
       fi }
  :: d_step { has[PODS] && runs[PODS] && forced < FORCED && mem.owner == PODS && up -> printf("PODS forced\n");
       forced++; has[PODS] = 0; record[PODS] = 0 }
  :: d_step { record[CLAIMS] && wipes < WIPES && mem.owner == CLAIMS && changes == CHANGES && last == dir -> printf("record lost\n");
       wipes++; record[CLAIMS] = 0 }
  od
}

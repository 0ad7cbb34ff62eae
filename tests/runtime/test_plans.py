"""Plans: one cache a thread, bounded, and forgotten in all threads at once."""

import gc
import threading
import weakref

from kernlib.runtime.plan import PLANS, PlanCache, forget_plans
from tests.support.limits import LIMIT_S


def test_the_oldest_plan_goes_first():
    cache = PlanCache()
    for index in range(PLANS + 3):
        cache.keep((index,), index)
    assert list(cache.plans) == [(index,) for index in range(3, PLANS + 3)]


def test_forgetting_reaches_every_thread_and_every_cache_and_goes_on():
    caches = [PlanCache(), PlanCache()]
    kept, forgotten, seen = threading.Barrier(3), threading.Event(), []

    def work(cache):
        cache.keep(("key",), 1)
        kept.wait(LIMIT_S)
        assert forgotten.wait(LIMIT_S)
        seen.append(dict(cache.plans))
        cache.keep(("key",), 2)
        seen.append(dict(cache.plans))

    threads = [threading.Thread(target=work, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    kept.wait(LIMIT_S)
    forget_plans()
    forgotten.set()
    for thread in threads:
        thread.join()
    assert sorted(map(str, seen)) == sorted(map(str, [{}, {}, {("key",): 2}, {("key",): 2}]))


def test_the_plans_of_a_thread_go_with_it():
    cache, gone, held, done = PlanCache(), [], threading.Event(), threading.Event()

    def work():
        made = {1}  # of which there are weak references
        gone.append(weakref.ref(made))
        cache.keep(("key",), made)
        del made
        held.set()
        done.wait(LIMIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert held.wait(LIMIT_S) and gone[0]() == {1}
    done.set()
    thread.join()
    gc.collect()
    assert gone[0]() is None


def test_a_thread_may_keep_plans_while_another_forgets_them():
    cache, done = PlanCache(), threading.Event()

    def forget():
        while not done.is_set():
            forget_plans()

    thread = threading.Thread(target=forget)
    thread.start()
    for index in range(20_000):
        cache.keep((index,), index)
    done.set()
    thread.join()
    assert len(cache.plans) <= PLANS

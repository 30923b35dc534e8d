import groovy.transform.CompileDynamic
import groovy.transform.CompileStatic
import io.prometheus.client.Gauge
import java.util.concurrent.ConcurrentHashMap
import java.util.concurrent.LinkedBlockingDeque
import java.util.concurrent.TimeUnit
import org.pytorch.serve.job.Job
import org.pytorch.serve.metrics.MetricCache
import org.pytorch.serve.wlm.BatchAggregator
import org.pytorch.serve.wlm.Model
import org.pytorch.serve.wlm.ModelManager
import org.pytorch.serve.wlm.WorkerState
import org.pytorch.serve.wlm.WorkerThread

/** Gives each version of a model a `ModelQueue`, and each of its workers `Batches`, as soon as TorchServe has made them. */
@CompileStatic
class Models {
    private static final long EVERY_MS = 50
    private static final long GONE_MS = 30_000
    private static final Map<Model, ModelQueue> QUEUES = new ConcurrentHashMap<>()
    private static final Map<Model, Long> GONE = new ConcurrentHashMap<>()

    /** Look for new models and workers, and for requests that no worker will take, from now on. */
    static void watch() {
        look()
        Thread thread = new Thread({
            while (true) {
                Thread.sleep(EVERY_MS)
                try {
                    look()
                } catch (RuntimeException ignored) {
                    // Something changed while it was looked at: the next time.
                }
            }
        } as Runnable, 'models')
        thread.setDaemon(true)
        thread.start()
    }

    static boolean hasReadyWorker(Model model) {
        return readyWorkers(model) > 0
    }

    private static int readyWorkers(Model model) {
        return ModelManager.getInstance().getWorkers(model.getModelVersionName()).count { WorkerThread worker ->
            worker.isRunning() && worker.getState() == WorkerState.WORKER_MODEL_LOADED
        }.intValue()
    }

    /** Healthy (every model has all its workers), Partial Healthy, or Unhealthy (a model has none). */
    static String health() {
        String word = 'Healthy'
        for (models in ModelManager.getInstance().getAllModels()) {
            Model model = models.value.getDefaultModel()
            int ready = readyWorkers(model)
            if (ready == 0) {
                return 'Unhealthy'
            }
            word = ready < model.getMinWorkers() ? 'Partial Healthy' : word
        }
        return word
    }

    /** The queue of a version (null: the default one); null where there is none. */
    static ModelQueue queueOf(String name, String version) {
        try {
            Model model = ModelManager.getInstance().getModel(name, version)
            return model == null ? null : QUEUES.get(model)
        } catch (Exception ignored) {
            return null
        }
    }

    /** The queue of a version (null: the default one) that TorchServe may be asked to remove: the default only alone. */
    static ModelQueue removable(String name, String version) {
        ModelQueue queue = queueOf(name, version)
        Set versions = queue == null ? null : ModelManager.getInstance().getAllModelVersions(name)
        boolean isDefault = queue != null && queue.is(queueOf(name, null))
        return queue == null || (isDefault && versions.size() > 1) ? null : queue
    }

    private static synchronized void look() {
        Set<Model> present = Collections.newSetFromMap(new IdentityHashMap<Model, Boolean>())
        ModelManager.getInstance().getAllModels().each { models ->
            models.value.getAllVersions().each { version -> present.add(version.value) }
        }
        present.each { Model model -> adopt(model) }
        long now = System.nanoTime()
        QUEUES.each { Model model, ModelQueue queue ->
            queue.sweep()
            // A request may be on its way to a version that has just gone.
            if (present.contains(model)) {
                GONE.remove(model)
            } else if (GONE.putIfAbsent(model, now) == null) {
                forget(model)
            } else if (now - GONE.get(model) > TimeUnit.MILLISECONDS.toNanos(GONE_MS)) {
                QUEUES.remove(model)
                GONE.remove(model)
                forget(model)  // its worker's last lines may have been read since
            }
        }
    }

    /** Take back what was told of a version: TorchServe (0.12) would tell it for as long as it runs. */
    private static void forget(Model model) {
        forgetGauge(model)
        StageTimes.forget(model)
    }

    @CompileDynamic
    private static void forgetGauge(Model model) {
        Gauge gauge = MetricCache.getInstance().getMetricBackend('PassedOver').@gauge
        gauge.collect().each { family ->
            family.samples.each { sample ->
                Map labels = [sample.labelNames, sample.labelValues].transpose().collectEntries()
                if (labels.ModelName == model.getModelName() && labels.ModelVersion == model.getVersion()) {
                    gauge.remove(sample.labelValues as String[])
                }
            }
        }
    }

    @CompileDynamic
    private static void adopt(Model model) {
        ModelQueue queue = QUEUES.get(model)
        if (queue == null) {
            queue = new ModelQueue(model, (LinkedBlockingDeque<Job>) model.@jobsDb.get(Model.DEFAULT_DATA_QUEUE))
            QUEUES.put(model, queue)
            model.@jobsDb.put(Model.DEFAULT_DATA_QUEUE, queue)
        }
        for (worker in ModelManager.getInstance().getWorkers(model.getModelVersionName())) {
            if (worker.@aggregator.class == BatchAggregator) {
                worker.@aggregator = new Batches(model, queue, worker.@aggregator.@jobs, worker.@replies)
                if (worker.getState() == WorkerState.WORKER_MODEL_LOADED) {
                    // It was ready before it was seen: it may wait at the queue of before for ever.
                    worker.@currentThread.get()?.interrupt()
                }
            }
        }
    }
}
